"""Ways for weights to reach servers: shared memory on one machine, a process group between machines, files always.

A transport is called bucket by bucket, for one server at a time or for all at once: `prepare` once a bucket, then
`load` for every server. `finish` ends an update, when a server has had all buckets. What a product is called for it
is in subclasses.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import shutil
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from rlkit.distributed.sender_group import SenderGroup
from rlkit.engines.server.api import ServerApi
from rlkit.engines.server.process import free_port, write_model
from rlkit.engines.server.states import DEADLINES, Step
from rlkit.engines.server.threads import in_daemon_thread
from rlkit.errors import EngineError
from rlkit.types import JsonObject

SHARED_MEMORY = Path("/dev/shm")

Parcel = TypeVar("Parcel")
"""What `prepare` makes of a bucket."""

Bucket = list[tuple[str, Tensor]]

Adapter = tuple[JsonObject, Bucket]
"""Adapters: their configuration and their tensors, in the form in which peft saves them."""


class Transport(ABC, Generic[Parcel]):
    """Brings buckets of tensors to servers. One that `brackets` is called between an update's begin and its end."""

    brackets = True

    async def open(self, targets: Sequence[ServerApi]) -> None:
        """Prepare for an update of these servers."""

    @abstractmethod
    def prepare(self, bucket: Bucket) -> Parcel:
        """Prepare a bucket for `load`, once for all servers."""

    async def send(self, parcel: Parcel) -> None:
        """Do, beside all servers' `load`, what is done once for all of them."""

    @abstractmethod
    async def load(self, api: ServerApi, parcel: Parcel) -> None:
        """Send a prepared bucket to a server."""

    async def finish(self, api: ServerApi) -> None:
        """Finish after a server has received all buckets."""

    async def adapt(self, api: ServerApi, adapter: Adapter) -> None:
        """Send a server adapters under the name `api.adapter`, in place of those that had it."""
        raise NotImplementedError

    def end(self) -> None:
        """Free what only the update that is over needed."""

    def close_group(self) -> None:
        """Leave the servers' process group, where there is one: some of its members are no more."""

    def close(self) -> None:
        """Free what is held for updates."""


def save(bucket: Bucket, file: Path) -> None:
    """Write tensors to a safetensors file.

    Raises:
        OSError: They cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.contiguous().cpu() for name, tensor in bucket}, file)
    except SafetensorError as error:
        raise OSError(f"{file} cannot be written: {error}") from error


class FileTransport(Transport[Path]):
    """Writes each bucket to a safetensors file that servers map: in shared memory, or on disk where that is full."""

    def __init__(self) -> None:
        self._file: Path | None = None

    def prepare(self, bucket: Bucket) -> Path:
        self.end()
        size = sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)
        fits = os.path.isdir(SHARED_MEMORY) and shutil.disk_usage(SHARED_MEMORY).free > 1.1 * size
        number, name = tempfile.mkstemp(".safetensors", "rlkit-weights-", SHARED_MEMORY if fits else None)
        os.close(number)
        self._file = Path(name)
        save(bucket, self._file)
        return self._file

    def end(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        self._file = None

    def close(self) -> None:
        self.end()


class TensorTransport(Transport[Bucket]):
    """Shared memory on a CPU and CUDA IPC on a GPU: only handles travel over HTTP.

    The tensors of a bucket are copied into one flat buffer of each type, which lives until all servers have answered.
    Each process of a server opens handles of its own: every opening counts one off what the sender has lent.

    Args:
        device: The trainer's.

    Raises:
        EngineError: The trainer's allocator makes memory that other processes cannot open by CUDA IPC.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            if device.type == "cuda" and "expandable_segments:true" in os.environ.get(name, "").lower():
                raise EngineError(
                    f"{name} is {os.environ[name]!r}, whose segments cannot be shared with servers by CUDA IPC; unset "
                    "expandable_segments, or choose transport: disk"
                )

    def prepare(self, bucket: Bucket) -> Bucket:
        return flatten(bucket)

    def end(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def flatten(bucket: Bucket) -> Bucket:
    """Return the same tensors as views of one new buffer of each type, so that they share one memory handle."""
    found: dict[str, Tensor] = {}
    for dtype in {tensor.dtype for _, tensor in bucket}:
        named = [(name, tensor) for name, tensor in bucket if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for _, tensor in named])
        parts = torch.split(flat, [tensor.numel() for _, tensor in named])
        found |= {name: part.view(tensor.shape) for (name, tensor), part in zip(named, parts, strict=True)}
    return [(name, found[name]) for name, _ in bucket]


def serialize(bucket: Bucket | dict[str, Tensor]) -> str:
    """Return handles to tensors' memory as text, to be opened once by each process of a server."""
    with _shared_by_name():
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(bucket)
    return base64.b64encode(buffer.getvalue()).decode()


@contextmanager
def _shared_by_name() -> Iterator[None]:
    """Share memory by name: a file descriptor cannot be sent to a process that is no child of this one."""
    strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]


class DiskTransport(Transport[None]):
    """Writes a Hugging Face folder that servers read: slow, and always there.

    Args:
        policy: Whose configuration goes with the weights.
        folder: Where to write, on a disk that all servers see; None takes a temporary folder of this machine.
    """

    brackets = False

    def __init__(self, policy: Any, folder: str | None = None) -> None:
        self._policy = policy
        self.folder = Path(tempfile.mkdtemp(prefix="rlkit-weights-", dir=folder))
        self._index: dict[str, str] = {}

    async def open(self, targets: Sequence[ServerApi]) -> None:
        self._index = {}
        write_model(self.folder, self._policy, frozenset())

    def prepare(self, bucket: Bucket) -> None:
        file = f"model-{len(set(self._index.values())):05d}.safetensors"
        save(bucket, self.folder / file)
        self._index |= {name: file for name, _ in bucket}
        index = {"metadata": {}, "weight_map": self._index}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")

    async def load(self, api: ServerApi, parcel: None) -> None:
        pass

    def write_adapter(self, adapter: Adapter) -> str:
        """Write adapters as peft does; return their folder."""
        config, tensors = adapter
        folder = self.folder / "adapter"
        folder.mkdir(exist_ok=True)
        save(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        return str(folder)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class Joining(NamedTuple):
    """How a server joins the process group: the address of its store, and its own first rank of `world`."""

    host: str
    port: int
    first_rank: int
    world: int
    name: str


class GroupTransport(Transport[Bucket]):
    """Broadcasts tensors over a process group of the trainer and all servers: nccl for GPUs, gloo for CPUs.

    The group is created again whenever the servers of an update differ from those of the last one, or were restarted.

    Args:
        device: The trainer's, from which the tensors are sent.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self._members: list[str] = []
        self._group: SenderGroup | None = None
        self._made = 0

    @property
    def name(self) -> str:
        """The group's name in the servers."""
        return f"rlkit-{self._made}"

    @abstractmethod
    async def join(self, api: ServerApi, joining: Joining) -> None:
        """Have a server join the group."""

    async def open(self, targets: Sequence[ServerApi]) -> None:
        members = [api.client.url for api in targets]
        if self._group is not None and members == self._members:
            return
        self.close_group()
        self._made += 1
        first = Joining(_reachable(members), free_port(), 1, 1 + sum(api.tensor_parallel for api in targets), self.name)
        servers: list[asyncio.Task[None]] = []
        address, world, seconds = (first.host, first.port), first.world, DEADLINES[Step.BEGIN]
        own = partial(SenderGroup, self.backend, address, world, self.name, seconds)
        trainer = asyncio.create_task(in_daemon_thread(self._device, own))
        for api in targets:
            servers.append(asyncio.create_task(self.join(api, first)))
            first = first._replace(first_rank=first.first_rank + api.tensor_parallel)
        self._group, *_ = await asyncio.wait_for(asyncio.gather(trainer, *servers), DEADLINES[Step.BEGIN])
        self._members = members

    def prepare(self, bucket: Bucket) -> Bucket:
        return [(name, tensor.to(self._device).contiguous()) for name, tensor in bucket]  # offloaded ones too

    async def send(self, parcel: Bucket) -> None:
        group = self._group
        assert group is not None
        work = in_daemon_thread(self._device, lambda: group.broadcast(x for _, x in parcel))
        await asyncio.wait_for(work, DEADLINES[Step.LOAD])

    def close_group(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group, self._members = None, []

    def close(self) -> None:
        self.close_group()


def is_local(url: str) -> bool:
    """Whether a server is on this machine, by its address."""
    return "://127.0.0.1" in url or "://localhost" in url


def _reachable(urls: Sequence[str]) -> str:
    """Return the address of this machine by which the servers can reach it."""
    if all(map(is_local, urls)):
        return "127.0.0.1"
    return socket.gethostbyname(socket.gethostname())

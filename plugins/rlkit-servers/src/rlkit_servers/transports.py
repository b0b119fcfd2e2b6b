"""How weights reach servers: shared memory on one machine, a process group between machines, or files anywhere.

A transport works bucket by bucket: `prepare` once for each bucket, then `load` for every server. `finish` ends the
update of a server that has received all buckets. Subclasses add a product's calls.
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
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from rlkit.base.errors import EngineError
from rlkit.distributed.sender_group import SenderGroup
from rlkit.types import JsonObject
from rlkit_servers.api import ServerApi
from rlkit_servers.changes import SentWeights, metadata_tensor
from rlkit_servers.process import TemporaryFolder, free_port, write_model
from rlkit_servers.states import DEADLINES, UpdateStep
from rlkit_servers.threads import in_daemon_thread

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM

SHARED_MEMORY = Path("/dev/shm")

Parcel = TypeVar("Parcel")
"""A bucket as `prepare` returns it."""

Bucket = list[tuple[str, Tensor]]

Adapter = tuple[JsonObject, Bucket]
"""Adapters: their configuration and their tensors, named as peft saves them."""


class Transport(ABC, Generic[Parcel]):
    """Sends buckets of tensors to servers."""

    brackets = True
    """Whether servers receive tensors between the steps that begin and end an update."""

    sent: SentWeights | None = None
    """What was last sent, if servers apply changes to it."""

    async def open(self, targets: Sequence[ServerApi]) -> None:
        """Prepare to update these servers."""

    @abstractmethod
    def prepare(self, bucket: Bucket) -> Parcel:
        """Prepare a bucket for `load`, once for all servers."""

    async def send(self, parcel: Parcel) -> None:
        """Do the part of sending that all servers share, concurrently with each server's `load`."""

    @abstractmethod
    async def load(self, api: ServerApi, parcel: Parcel) -> None:
        """Send a prepared bucket to a server."""

    async def finish(self, api: ServerApi) -> None:
        """End the update of a server that has received all buckets."""

    async def adapt(self, api: ServerApi, adapter: Adapter) -> None:
        """Send adapters to a server, in place of those named `api.adapter`."""
        raise NotImplementedError

    def end(self) -> None:
        """Free what only the finished update needed."""

    def close_group(self) -> None:
        """Leave the servers' process group, if there is one: some of its members may be dead."""

    def close(self) -> None:
        """Free everything held for updates."""


def save(bucket: Bucket, file: Path, metadata: dict[str, str] | None = None) -> None:
    """Write tensors, and the `metadata` of their update, to a safetensors file.

    Raises:
        OSError: They cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.contiguous().cpu() for name, tensor in bucket}, file, metadata)
    except SafetensorError as error:
        raise OSError(f"{file} cannot be written: {error}") from error


class FileTransport(Transport[Path]):
    """Writes each bucket to a safetensors file that servers map: in shared memory, or on disk if that is full.

    Args:
        changes: Whether servers pass a file's tensors and metadata to a `WeightReceiver`, so that changes are enough.
    """

    def __init__(self, changes: bool = False) -> None:
        self.sent = SentWeights() if changes else None
        self._folders: dict[str | None, TemporaryFolder] = {}
        self._file: Path | None = None

    def prepare(self, bucket: Bucket) -> Path:
        self.end()
        metadata = None
        if self.sent is not None:
            bucket, metadata = self.sent.encode(bucket)
        size = sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)
        fits = os.path.isdir(SHARED_MEMORY) and shutil.disk_usage(SHARED_MEMORY).free > 1.1 * size
        parent = str(SHARED_MEMORY) if fits else None
        if parent not in self._folders:
            self._folders[parent] = TemporaryFolder("rlkit-weights-", parent)
        descriptor, name = tempfile.mkstemp(".safetensors", dir=self._folders[parent].path)
        os.close(descriptor)
        self._file = Path(name)
        save(bucket, self._file, metadata)
        return self._file

    def end(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        self._file = None

    def close(self) -> None:
        self.end()
        while self._folders:
            self._folders.popitem()[1].remove()


class ChangesTransport(Transport[str]):
    """Weights, or their changes, in the bodies of HTTP calls: to servers on other machines, over any network.

    Servers pass each bucket to a `CheckpointReceiver`; the last one of an update has no tensors.
    """

    def __init__(self) -> None:
        self.sent: SentWeights = SentWeights()
        self._version = ""

    @abstractmethod
    def pack(self, bucket: Bucket) -> bytes:
        """Return tensors as the product reads them."""

    def prepare(self, bucket: Bucket) -> str:
        tensors, metadata = self.sent.encode(bucket)
        self._version = metadata.get("version", "")
        return self._text([*tensors, metadata_tensor(metadata)])

    async def finish(self, api: ServerApi) -> None:
        await self.load(api, self._text([metadata_tensor({"finish": self._version})]))

    def _text(self, bucket: Bucket) -> str:
        return base64.b64encode(self.pack(bucket)).decode()


class TensorTransport(Transport[Bucket]):
    """Shares memory on a CPU and uses CUDA IPC on a GPU: only handles travel over HTTP.

    The tensors of a bucket are copied into one flat buffer per dtype, which lives until all servers have responded.
    Each process of a server opens its own handles, since opening a handle decrements the sender's reference count.

    Args:
        device: The trainer's device.

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
    """Return the same tensors as views of one new buffer per dtype, so that they share one memory handle."""
    views: dict[str, Tensor] = {}
    for dtype in {tensor.dtype for _, tensor in bucket}:
        named = [(name, tensor) for name, tensor in bucket if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for _, tensor in named])
        parts = torch.split(flat, [tensor.numel() for _, tensor in named])
        views |= {name: part.view(tensor.shape) for (name, tensor), part in zip(named, parts, strict=True)}
    return [(name, views[name]) for name, _ in bucket]


def serialize(bucket: Bucket | dict[str, Tensor]) -> str:
    """Return handles to the tensors' memory as text; one process of a server can open it, once."""
    with _shared_by_name():
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(bucket)
    return base64.b64encode(buffer.getvalue()).decode()


@contextmanager
def _shared_by_name() -> Iterator[None]:
    """Share memory by name: file descriptors can be sent to child processes only."""
    strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]


class DiskTransport(Transport[None]):
    """Writes a Hugging Face folder that servers read: slow, but always possible.

    Args:
        policy: The model whose configuration is written with the weights.
        folder: Parent folder on a disk that all servers see; None for a temporary folder of this machine.
    """

    brackets = False

    def __init__(self, policy: CausalLM, folder: str | None = None) -> None:
        self._policy = policy
        self._temporary = TemporaryFolder("rlkit-weights-", folder)
        self.folder = self._temporary.path
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
        """Write adapters as peft does, and return their folder."""
        config, tensors = adapter
        folder = self.folder / "adapter"
        folder.mkdir(exist_ok=True)
        save(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        return str(folder)

    def close(self) -> None:
        self._temporary.remove()


class Joining(NamedTuple):
    """How a server joins the process group: the address of the store, and the server's first rank of `world`."""

    host: str
    port: int
    first_rank: int
    world: int
    name: str


class GroupTransport(Transport[Bucket]):
    """Broadcasts tensors over a process group of the trainer and all servers: nccl for GPUs, gloo for CPUs.

    The group is recreated when the servers of an update differ from those of the last one, or were restarted.

    Args:
        device: The trainer's device, from which the tensors are sent.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self._members: list[str] = []
        self._group: SenderGroup | None = None
        self._group_count = 0

    @property
    def name(self) -> str:
        """The group's name on the servers."""
        return f"rlkit-{self._group_count}"

    @abstractmethod
    async def join(self, api: ServerApi, joining: Joining) -> None:
        """Have a server join the group."""

    async def open(self, targets: Sequence[ServerApi]) -> None:
        members = [api.client.url for api in targets]
        if self._group is not None and members == self._members:
            return
        self.close_group()
        self._group_count += 1
        host, port, seconds = _own_address(members), free_port(), DEADLINES[UpdateStep.BEGIN]
        world = 1 + sum(api.tensor_parallel for api in targets)
        create = partial(SenderGroup, self.backend, (host, port), world, self.name, seconds)
        trainer = asyncio.create_task(in_daemon_thread(self._device, create))
        servers: list[asyncio.Task[None]] = []
        first_rank = 1
        for api in targets:
            servers.append(asyncio.create_task(self.join(api, Joining(host, port, first_rank, world, self.name))))
            first_rank += api.tensor_parallel
        self._group, *_ = await asyncio.wait_for(asyncio.gather(trainer, *servers), seconds)
        self._members = members

    def prepare(self, bucket: Bucket) -> Bucket:
        return [(name, tensor.to(self._device).contiguous()) for name, tensor in bucket]  # they may be offloaded

    async def send(self, parcel: Bucket) -> None:
        group = self._group
        assert group is not None
        work = in_daemon_thread(self._device, lambda: group.broadcast(x for _, x in parcel))
        await asyncio.wait_for(work, DEADLINES[UpdateStep.LOAD])

    def close_group(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None
        self._members = []

    def close(self) -> None:
        self.close_group()


def is_local(address: str) -> bool:
    """Whether a host or a url is on this machine."""
    return address.rpartition("://")[2].partition(":")[0] in ("127.0.0.1", "localhost")


def _own_address(urls: Sequence[str]) -> str:
    """Return the address by which servers can reach this machine."""
    if all(map(is_local, urls)):
        return "127.0.0.1"
    return socket.gethostbyname(socket.gethostname())

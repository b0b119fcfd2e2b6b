"""Ways for weights to reach SGLang servers: shared memory on one node, a process group between nodes, files always.

A transport is asked bucket by bucket, for one server at a time or for all at once: `prepare` once a bucket, then
`load` for every server. `finish` ends an update, when a server has had all buckets.
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
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlkit.engines.server.http import Client, Fault
from rlkit.engines.server.states import DEADLINES, Step
from rlkit.engines.sglang.process import free_port, write_model
from rlkit.errors import EngineError

AS_SGLANG = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""What SGLang sets for its side of a group; NCCL reads it once, when a process makes its first group."""

Bucket = list[tuple[str, Tensor]]

Adapter = tuple[dict[str, Any], Bucket]
"""Adapters: their configuration and their tensors, in the form in which peft saves them."""


class Transport(ABC):
    """Brings buckets of tensors to servers. One that `brackets` is called between an update's begin and its end."""

    brackets = True

    async def open(self, targets: Sequence[tuple[Client, int]]) -> None:
        """Get ready for an update of these servers, each with the number of its GPUs."""

    @abstractmethod
    def prepare(self, bucket: Bucket) -> Any:
        """Make of a bucket what `load` sends, once for all servers."""

    async def send(self, parcel: Any) -> None:
        """Do, beside all servers' `load`, what is done once for all of them."""

    @abstractmethod
    async def load(self, client: Client, tp: int, parcel: Any) -> None:
        """Bring a server what `prepare` made."""

    async def finish(self, client: Client) -> None:
        """Do what is left once a server has had all buckets."""

    async def adapt(self, client: Client, tp: int, name: str, adapter: Adapter) -> None:
        """Return a server adapters under a name, in place of those that had it."""
        raise NotImplementedError

    def end(self) -> None:
        """Free what only the update that is over needed."""

    def close_group(self) -> None:
        """Leave the servers' process group, where there is one: some of its members are no more."""

    def close(self) -> None:
        """Free what is held for updates."""


class TensorTransport(Transport):
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
                    f"{name} is {os.environ[name]!r}, whose segments cannot be handed to SGLang by CUDA IPC; unset "
                    "expandable_segments, or choose SGLangServer with transport: disk"
                )

    def prepare(self, bucket: Bucket) -> Bucket:
        return flatten(bucket)

    async def load(self, client: Client, tp: int, parcel: Any) -> None:
        body = {"serialized_named_tensors": [serialize(parcel) for _ in range(tp)], "flush_cache": False}
        await client.post("/update_weights_from_tensor", body, DEADLINES[Step.LOAD])

    async def adapt(self, client: Client, tp: int, name: str, adapter: Adapter) -> None:
        config, tensors = adapter
        flat = dict(flatten(tensors))
        await _unload(client, name)
        body = {
            "lora_name": name,
            "config_dict": config,
            "serialized_named_tensors": [serialize(flat) for _ in range(tp)],
        }
        await client.post("/load_lora_adapter_from_tensors", body, DEADLINES[Step.ADAPT])

    def end(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


async def _unload(client: Client, name: str) -> None:
    """Let a server forget the adapters of a name; it refuses where it has none."""
    try:
        await client.post("/unload_lora_adapter", {"lora_name": name}, DEADLINES[Step.ADAPT])
    except Fault as fault:
        if fault.status is None:
            raise


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


class DiskTransport(Transport):
    """Writes a Hugging Face folder that servers read: slow, and always there.

    Args:
        policy: Whose configuration goes with the weights.
        folder: Where to write, on a disk that all servers see; None takes a temporary folder of this machine.
    """

    brackets = False

    def __init__(self, policy: Any, folder: str | None = None) -> None:
        self._policy = policy
        self._folder = Path(tempfile.mkdtemp(prefix="rlkit-weights-", dir=folder))
        self._index: dict[str, str] = {}

    async def open(self, targets: Sequence[tuple[Client, int]]) -> None:
        self._index = {}
        write_model(self._folder, self._policy, frozenset())

    def prepare(self, bucket: Bucket) -> None:
        from safetensors.torch import save_file

        file = f"model-{len(set(self._index.values())):05d}.safetensors"
        save_file({name: tensor.contiguous().cpu() for name, tensor in bucket}, self._folder / file)
        self._index |= {name: file for name, _ in bucket}
        index = {"metadata": {}, "weight_map": self._index}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index))

    async def load(self, client: Client, tp: int, parcel: Any) -> None:
        pass

    async def finish(self, client: Client) -> None:
        body = {"model_path": str(self._folder), "load_format": "auto", "flush_cache": False}
        await client.post("/update_weights_from_disk", body, DEADLINES[Step.END])

    async def adapt(self, client: Client, tp: int, name: str, adapter: Adapter) -> None:
        from safetensors.torch import save_file

        config, tensors = adapter
        folder = self._folder / "adapter"
        folder.mkdir(exist_ok=True)
        save_file({name: x.contiguous().cpu() for name, x in tensors}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(config))
        await _unload(client, name)
        await client.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, DEADLINES[Step.ADAPT])

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class GroupTransport(Transport):
    """Broadcasts tensors over a process group of the trainer and all servers: nccl for GPUs, gloo for CPUs.

    The group is made anew whenever the servers of an update are others than those of the last one, or were restarted.

    Args:
        device: The trainer's, from which the tensors are sent.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._members: list[str] = []
        self._group: Any = None
        self._made = 0

    async def open(self, targets: Sequence[tuple[Client, int]]) -> None:
        members = [client.url for client, _ in targets]
        if self._group is not None and members == self._members:
            return
        self.close_group()
        self._made += 1
        host, port = _reachable(members), free_port()
        world = 1 + sum(tp for _, tp in targets)
        joining = [asyncio.create_task(_in_thread(self._join, host, port, world))]
        offset = 1
        for client, tp in targets:
            body = {
                "master_address": host, "master_port": port, "rank_offset": offset, "world_size": world,
                "group_name": self._name, "backend": self._backend,
            }  # fmt: skip
            joining.append(asyncio.create_task(client.post("/init_weights_update_group", body, DEADLINES[Step.BEGIN])))
            offset += tp
        self._group, *_ = await asyncio.wait_for(asyncio.gather(*joining), DEADLINES[Step.BEGIN])
        self._members = members

    @property
    def _name(self) -> str:
        return f"rlkit-{self._made}"

    def _join(self, host: str, port: int, world: int) -> Any:
        """Make the group beside the trainer's own, in the way in which SGLang joins it."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]
        from torch.distributed import distributed_c10d as c10d

        limit = timedelta(seconds=DEADLINES[Step.BEGIN])
        # not by c10d.rendezvous, which under torchrun takes the store for one that torchrun serves
        store = TCPStore(host, port, world, is_master=True, timeout=limit, multi_tenant=True)
        prefixed, backend = c10d.PrefixStore(self._name, store), c10d.Backend(self._backend)
        name: Any = self._name
        with _unbound():
            group, _ = c10d._new_process_group_helper(world, 0, [], backend, prefixed, name, timeout=limit)
        c10d._world.pg_group_ranks[group] = {i: i for i in range(world)}
        return group

    def prepare(self, bucket: Bucket) -> Bucket:
        return [(name, tensor.to(self._device).contiguous()) for name, tensor in bucket]  # offloaded ones too

    async def send(self, parcel: Any) -> None:
        def broadcast() -> None:
            for _, tensor in parcel:
                torch.distributed.broadcast(tensor, src=0, group=self._group)

        await asyncio.wait_for(_in_thread(broadcast), DEADLINES[Step.LOAD])

    async def load(self, client: Client, tp: int, parcel: Any) -> None:
        body = {
            "names": [name for name, _ in parcel],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in parcel],
            "shapes": [list(tensor.shape) for _, tensor in parcel],
            "group_name": self._name,
            "flush_cache": False,
        }
        await client.post("/update_weights_from_distributed", body, DEADLINES[Step.LOAD])

    def close_group(self) -> None:
        if self._group is not None:
            torch.distributed.destroy_process_group(self._group)
        self._group, self._members = None, []

    def close(self) -> None:
        self.close_group()


@contextmanager
def _unbound() -> Iterator[None]:
    """Keep torch from splitting the new group off the trainer's, which would wait for all of the trainer's ranks."""
    own: Any = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    if own is None or own.bound_device_id is None:
        yield
        return
    bound, own.bound_device_id = own.bound_device_id, None
    try:
        yield
    finally:
        own.bound_device_id = bound


async def _in_thread(function: Any, *args: Any) -> Any:
    """Run what blocks in a thread that, if it never returns, does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def set_result(result: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_result(result) if error is None else done.set_exception(error)

    def work() -> None:
        try:
            result, error = function(*args), None
        except Exception as failure:
            result, error = None, failure
        if not loop.is_closed():
            loop.call_soon_threadsafe(set_result, result, error)

    threading.Thread(target=work, daemon=True).start()
    return await done


def is_local(url: str) -> bool:
    """Whether a server is on this machine, by its address."""
    return "://127.0.0.1" in url or "://localhost" in url


def _reachable(urls: Sequence[str]) -> str:
    """Return the address of this machine by which the servers can reach it."""
    if all(map(is_local, urls)):
        return "127.0.0.1"
    return socket.gethostbyname(socket.gethostname())

"""Offload to host memory of what a rollout does not need."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

CHUNK_BYTES = 256 * 1024**2
"""Size of a piece of host memory, unless a tensor is larger."""

ALIGNED = 512
"""Where tensors begin in one, in bytes."""


@dataclass
class HostMemory:
    """Host memory that is allocated once, page-locked so that copies run at the speed of the bus.

    Its pieces are powers of 2, to which torch rounds what is page-locked, and tensors lie in them one after another.

    Args:
        pinned: Whether it is page-locked, for which there must be a GPU.
    """

    pinned: bool
    chunks: list[Tensor] = field(default_factory=list)
    used: list[int] = field(default_factory=list)

    def clear(self) -> None:
        """Use the memory again; tensors that were copied to it must not be read any more."""
        self.used = [0] * len(self.chunks)

    @torch.no_grad()
    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of a contiguous tensor, which is complete once its device has been waited for."""
        size = -(-tensor.nbytes // ALIGNED) * ALIGNED
        rooms = (i for i, chunk in enumerate(self.chunks) if self.used[i] + size <= len(chunk))
        place = next(rooms, len(self.chunks))
        if place == len(self.chunks):
            length = max(CHUNK_BYTES, 1 << (size - 1).bit_length())
            self.chunks.append(self._allocate(length))
            self.used.append(0)
        piece = self.chunks[place][self.used[place] :][: tensor.nbytes]
        self.used[place] += size
        return piece.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)

    def _allocate(self, length: int) -> Tensor:
        try:
            return torch.empty(length, dtype=torch.uint8, pin_memory=self.pinned)
        except RuntimeError as error:
            if not self.pinned:
                raise
            warnings.warn(f"offloading is slow: host memory cannot be page-locked ({error})", stacklevel=2)
            self.pinned = False
            return self._allocate(length)


@dataclass
class HostOffload:
    """Modules and optimizers that are offloaded to host memory while an engine needs the device.

    Args:
        modules: Sharded or not.
        optimizers: Their state is offloaded.
        device: The one that they are moved back to.
    """

    modules: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    device: torch.device
    away: bool = False
    hosts: dict[int, HostMemory] = field(init=False)
    """Of each module, and of all optimizers under -1."""

    def __post_init__(self) -> None:
        self.hosts = defaultdict(lambda: HostMemory(pinned=self.device.type == "cuda"))

    @contextmanager
    def off_device(self) -> Iterator[None]:
        """Offload everything; modules must not be called, nor optimizers stepped, inside this context."""
        for module in self.modules:
            self._offload(module)
        memory = self.hosts[-1]
        memory.clear()
        self._move_states(partial(_to_host, memory))
        self._free()
        self.away = True
        try:
            yield
        finally:
            self.away = False
            for module in self.modules:
                module.to(self.device)
            self._move_states(lambda state: state.to(self.device))

    @contextmanager
    def back(self, module: nn.Module) -> Iterator[None]:
        """Move one of the modules to the device for this context, if it is offloaded."""
        if not self.away:
            yield
            return
        module.to(self.device)
        try:
            yield
        finally:
            self._offload(module)
            self._free()

    def _free(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # until the copies are complete
        free_cached(self.device)

    def _offload(self, module: nn.Module) -> None:
        memory = self.hosts[id(module)]
        memory.clear()
        module._apply(partial(_to_host, memory))  # type: ignore[no-untyped-call]  # as `to` does

    def _move_states(self, move: Callable[[Tensor], Tensor]) -> None:
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.dim() > 0:  # counts of steps stay where they are
                        state[key] = move(value)


def _to_host(memory: HostMemory, tensor: Tensor) -> Tensor:
    """Return a tensor on the host: a shard, which belongs to a mesh, in memory of its own."""
    from torch.distributed.tensor import DTensor

    if tensor.device.type == "cpu" or isinstance(tensor, DTensor) or not tensor.is_contiguous():
        return tensor.to("cpu")
    return memory.copy(tensor)


def free_cached(device: torch.device) -> None:
    """Free device memory that this process holds unused: blocks shared with other processes, then the cache."""
    if device.type == "cuda":
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def use_device(device: torch.device) -> None:
    """Make a GPU the current device of the calling thread; other devices need no such choice."""
    if device.type == "cuda":
        torch.cuda.set_device(device)

"""Offloading of modules and optimizers to host memory."""

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
"""Minimum size of a chunk of host memory."""

ALIGNMENT = 512
"""Alignment of tensors in a chunk, in bytes."""


@dataclass
class HostMemory:
    """Host memory that is allocated once, page-locked so that copies run at the speed of the bus.

    The sizes of its chunks are powers of 2, since torch rounds page-locked memory up to these. Tensors lie in a chunk
    one after another.

    Args:
        pinned: Whether the memory is page-locked, which requires a GPU.
        chunks: The allocated memory.
        used: Bytes in use of each chunk.
    """

    pinned: bool
    chunks: list[Tensor] = field(default_factory=list)
    used: list[int] = field(default_factory=list)

    def clear(self) -> None:
        """Reuse the memory; earlier copies must not be read any more."""
        self.used = [0] * len(self.chunks)

    @torch.no_grad()
    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of a contiguous tensor; it is complete after its device is synchronized."""
        size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        fitting = (i for i, chunk in enumerate(self.chunks) if self.used[i] + size <= len(chunk))
        index = next(fitting, len(self.chunks))
        if index == len(self.chunks):
            length = max(CHUNK_BYTES, 1 << (size - 1).bit_length())
            self.chunks.append(self._allocate(length))
            self.used.append(0)
        target = self.chunks[index][self.used[index] :][: tensor.nbytes]
        self.used[index] += size
        return target.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)

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
    """Offloads modules and optimizers to host memory while an engine needs the device.

    Args:
        modules: Modules to offload, sharded or not.
        optimizers: Optimizers whose state to offload.
        device: Device to move them back to.
        away: Whether they are offloaded.
    """

    modules: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    device: torch.device
    away: bool = False
    hosts: dict[int, HostMemory] = field(init=False)
    """Host memory by the id of its module; that of all optimizers is under -1."""

    def __post_init__(self) -> None:
        self.hosts = defaultdict(lambda: HostMemory(pinned=self.device.type == "cuda"))

    @contextmanager
    def off_device(self) -> Iterator[None]:
        """Offload everything; inside this context modules must not be called, nor optimizers stepped."""
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
        """Move an offloaded module to the device for this context."""
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
            torch.cuda.synchronize(self.device)  # wait for the copies
        free_cached(self.device)

    def _offload(self, module: nn.Module) -> None:
        memory = self.hosts[id(module)]
        memory.clear()
        module._apply(partial(_to_host, memory))  # type: ignore[no-untyped-call]  # as `nn.Module.to` does

    def _move_states(self, move: Callable[[Tensor], Tensor]) -> None:
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.dim() > 0:  # step counts stay on their device
                        state[key] = move(value)


def _to_host(memory: HostMemory, tensor: Tensor) -> Tensor:
    """Return a tensor on the host, in `memory` unless it is a shard or not contiguous."""
    from torch.distributed.tensor import DTensor

    if tensor.device.type == "cpu" or isinstance(tensor, DTensor) or not tensor.is_contiguous():
        return tensor.to("cpu")
    return memory.copy(tensor)


def free_cached(device: torch.device) -> None:
    """Free unused device memory of this process: blocks shared with other processes, then the cache."""
    if device.type == "cuda":
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def use_device(device: torch.device) -> None:
    """Make a GPU the current device of the calling thread; do nothing for other devices."""
    if device.type == "cuda":
        torch.cuda.set_device(device)

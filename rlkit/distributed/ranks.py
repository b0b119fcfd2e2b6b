"""Collectives by name: reductions, gathers, broadcasts and exchanges among the ranks of a run."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor
from torch.distributed import ProcessGroup

from rlkit.distributed.fsdp2 import FSDP2
from rlkit.errors import RlkitError

T = TypeVar("T")

POLL_SECONDS = 0.02
"""How often a rank checks whether the others have joined an asynchronous collective."""


class Ranks:
    """This rank among the others.

    Ranks of one tensor-parallel group hold the same data and count as one: `index` of `count` is the position among
    the data-parallel ranks, and only the `lead` of each group samples. All ranks must call the methods that
    communicate, in the same order: never under a condition that one rank alone can evaluate.

    Args:
        fabric: Launched.
    """

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.count, self.index, self.lead = fabric.world_size, fabric.global_rank, True
        self.tensor_parallel = 1
        self._data: ProcessGroup | None = None
        self._tensor: ProcessGroup | None = None
        if isinstance(fabric.strategy, FSDP2):
            mesh = fabric.strategy.device_mesh
            data, tensor = mesh["data_parallel"], mesh["tensor_parallel"]
            self.count, self.index = data.size(), data.get_local_rank()
            self.tensor_parallel, self.lead = tensor.size(), tensor.get_local_rank() == 0
            self._data, self._tensor = data.get_group(), tensor.get_group()

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Sum a tensor over the data-parallel ranks."""
        if self.count == 1:
            return x
        summed = x.to(self.fabric.device, copy=True).contiguous()
        dist.all_reduce(summed, group=self._data)
        return summed.to(x.device)

    def gather_dp(self, value: T) -> list[T]:
        """Return every data-parallel rank's value, in order."""
        if self.count == 1:
            return [value]
        everyone = [value] * self.count
        dist.all_gather_object(everyone, value, group=self._data)
        return everyone

    def gather_world(self, value: T) -> list[T]:
        """Return every rank's value, those of tensor-parallel groups included, in order."""
        if self.fabric.world_size == 1:
            return [value]
        found = [value] * self.fabric.world_size
        dist.all_gather_object(found, value)
        return found

    def on_first(self, work: Callable[[], T]) -> T | None:
        """Run `work` on the first rank and return its value there, None elsewhere; its error is raised on every rank.

        Raises:
            RlkitError: What `work` raised.
        """
        value, problem = None, None
        if self.fabric.is_global_zero:
            try:
                value = work()
            except RlkitError as error:
                problem = error
        self.raise_any(problem)
        return value

    def from_first(self, work: Callable[[], T]) -> T:
        """Run `work` on the first rank and return its value on every rank; its error is raised on every rank.

        Raises:
            RlkitError: What `work` raised.
        """
        found: T = self.same(self.on_first(work))  # type: ignore[assignment]
        return found

    def gather(self, x: Tensor) -> Tensor:
        """Concatenate a vector, whose length may differ, over the data-parallel ranks."""
        return x if self.count == 1 else torch.cat(self.gather_dp(x.cpu())).to(x.device)

    def all_reduce_max(self, value: float) -> float:
        """Return the largest of all ranks' values, those of tensor-parallel groups included."""
        if self.fabric.world_size == 1:
            return value
        wrapped = torch.tensor(float(value), device=self.fabric.device)
        dist.all_reduce(wrapped, dist.ReduceOp.MAX)
        return float(wrapped)

    def any(self, flag: bool) -> bool:
        """Return whether a flag is true on any rank, those of tensor-parallel groups included."""
        return self.all_reduce_max(flag) > 0

    def all(self, flag: bool) -> bool:
        """Return whether a flag is true on every rank, those of tensor-parallel groups included."""
        return not self.any(not flag)

    def same(self, value: T) -> T:
        """Return the first rank's value, on every rank."""
        if self.fabric.world_size == 1:
            return value
        wrapped = [value]
        dist.broadcast_object_list(wrapped)
        return wrapped[0]

    def raise_any(self, error: RlkitError | None) -> None:
        """Raise on every rank if any rank has an error: its own if it has one, else that of the lowest rank.

        Raises:
            RlkitError: Some rank has an error.
        """
        found = [one for one in self.gather_world(error) if one is not None]
        if found:
            raise error or found[0]

    def broadcast_tp(self, value: T) -> T:
        """Return the value of the first rank of this rank's tensor-parallel group."""
        if self.tensor_parallel == 1:
            return value
        wrapped = [value]
        dist.broadcast_object_list(wrapped, group=self._tensor, group_src=0)
        return wrapped[0]

    def exchange(self, outgoing: Sequence[list[T]]) -> list[T]:
        """Send `outgoing[r]` to each data-parallel rank r; return what came, in the order of the senders."""
        if self.count == 1:
            return outgoing[0]
        payloads = [torch.frombuffer(bytearray(pickle.dumps(out)), dtype=torch.uint8) for out in outgoing]
        sizes = self.gather_dp([len(p) for p in payloads])
        incoming = torch.empty(sum(row[self.index] for row in sizes), dtype=torch.uint8)
        arriving = [row[self.index] for row in sizes]
        dist.all_to_all_single(incoming, torch.cat(payloads), arriving, sizes[self.index], group=self._data)
        parts = torch.split(incoming, arriving)
        return [item for part in parts for item in pickle.loads(part.numpy().tobytes())]


class SideGroup:
    """The same ranks in a second process group, for a thread beside the training; all ranks must create it.

    Its collectives, on CPU tensors alone since a GPU that waits is busy, have the deadline of the default group's, and
    never match one of those, be it that one was cancelled halfway.

    Args:
        fabric: Launched.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._size = fabric.world_size
        self.group: ProcessGroup | None = None
        if self._size > 1:
            self.group = dist.new_group(backend="gloo", timeout=getattr(fabric.strategy, "_timeout", None))

    def gather_world(self, value: T) -> list[T]:
        """Return every rank's value, in order."""
        if self.group is None:
            return [value]
        found = [value] * self._size
        dist.all_gather_object(found, value, group=self.group)
        return found

    async def any_async(self, flag: bool) -> bool:
        """Return whether a flag is true on any rank; the event loop runs on until all ranks have called this."""
        if self.group is None:
            return flag
        wrapped = torch.tensor(float(flag))
        work = dist.all_reduce(wrapped, dist.ReduceOp.MAX, group=self.group, async_op=True)
        while not work.is_completed():
            await asyncio.sleep(POLL_SECONDS)
        work.wait()
        return bool(wrapped)

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

from rlkit.base.errors import RlkitError
from rlkit.distributed.fsdp2 import FSDP2Strategy
from rlkit.distributed.sequence import SequenceGroup

T = TypeVar("T")

POLL_SECONDS = 0.02
"""Interval in which a rank checks whether all ranks have joined an asynchronous collective."""


class Ranks:
    """This rank and its collectives with all ranks.

    Ranks that share matrix products (tensor parallelism) or the tokens of rows (sequence parallelism) have the same
    rows and count as one: `index` and `count` are those of the data-parallel ranks, and only the `lead` of each group
    samples. All ranks must call the methods that communicate, in the same order: never under a condition that may
    differ between ranks.

    Args:
        fabric: A launched Fabric.
    """

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.count = fabric.world_size
        self.index = fabric.global_rank
        self.lead = True
        self.tensor_parallel = 1
        self.sequence_parallel = 1
        self.sequence: SequenceGroup | None = None
        self._data: ProcessGroup | None = None
        self._copies: ProcessGroup | None = None
        if isinstance(fabric.strategy, FSDP2Strategy):
            mesh, sequence = fabric.strategy.rows_mesh, fabric.strategy.sequence_mesh
            self.count = mesh.size(0)
            self.index = mesh.get_local_rank(0)
            self.tensor_parallel = fabric.strategy.tensor_parallel
            self.sequence_parallel = fabric.strategy.sequence_parallel
            self.lead = mesh.get_local_rank(1) == 0
            self._data = mesh.get_group(0)
            self._copies = mesh.get_group(1)
            self.sequence = None if sequence is None else SequenceGroup(sequence.get_group())

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
        values = [value] * self.count
        dist.all_gather_object(values, value, group=self._data)
        return values

    def gather_world(self, value: T) -> list[T]:
        """Return every rank's value in order, those with the same rows included."""
        if self.fabric.world_size == 1:
            return [value]
        values = [value] * self.fabric.world_size
        dist.all_gather_object(values, value)
        return values

    def on_first(self, work: Callable[[], T]) -> T | None:
        """Run `work` on the first rank and return its value there, None elsewhere.

        Raises:
            RlkitError: `work` raised it; it is raised on every rank.
        """
        value = problem = None
        if self.fabric.is_global_zero:
            try:
                value = work()
            except RlkitError as error:
                problem = error
        self.raise_any(problem)
        return value

    def from_first(self, work: Callable[[], T]) -> T:
        """Run `work` on the first rank and return its value on every rank.

        Raises:
            RlkitError: `work` raised it; it is raised on every rank.
        """
        value: T = self.same(self.on_first(work))  # type: ignore[assignment]
        return value

    def gather(self, x: Tensor) -> Tensor:
        """Concatenate a vector over the data-parallel ranks; its length may differ."""
        return x if self.count == 1 else torch.cat(self.gather_dp(x.cpu())).to(x.device)

    def all_reduce_max(self, value: float) -> float:
        """Return the largest value of all ranks, those with the same rows included."""
        if self.fabric.world_size == 1:
            return value
        wrapped = torch.tensor(float(value), device=self.fabric.device)
        dist.all_reduce(wrapped, dist.ReduceOp.MAX)
        return float(wrapped)

    def any(self, flag: bool) -> bool:
        """Check whether a flag is true on any rank, those with the same rows included."""
        return self.all_reduce_max(flag) > 0

    def all(self, flag: bool) -> bool:
        """Check whether a flag is true on every rank, those with the same rows included."""
        return not self.any(not flag)

    def same(self, value: T) -> T:
        """Return the first rank's value on every rank."""
        if self.fabric.world_size == 1:
            return value
        wrapped = [value]
        dist.broadcast_object_list(wrapped)
        return wrapped[0]

    def raise_any(self, error: RlkitError | None) -> None:
        """Raise on every rank if any rank has an error: the rank's own error, else that of the lowest rank.

        Raises:
            RlkitError: A rank has an error.
        """
        errors = [rank_error for rank_error in self.gather_world(error) if rank_error is not None]
        if errors:
            raise error or errors[0]

    def broadcast_tp(self, value: T) -> T:
        """Return the value of the first of the ranks that have this rank's rows, by tensor or sequence parallelism."""
        if self.tensor_parallel * self.sequence_parallel == 1:
            return value
        wrapped = [value]
        dist.broadcast_object_list(wrapped, group=self._copies, group_src=0)
        return wrapped[0]

    def exchange(self, outgoing: Sequence[list[T]]) -> list[T]:
        """Send `outgoing[r]` to each data-parallel rank r; return the received items in the order of the senders."""
        if self.count == 1:
            return outgoing[0]
        payloads = [torch.frombuffer(bytearray(pickle.dumps(items)), dtype=torch.uint8) for items in outgoing]
        sizes = torch.tensor([len(payload) for payload in payloads])
        incoming_sizes = torch.empty_like(sizes)
        dist.all_to_all_single(incoming_sizes, sizes, group=self._data)
        received_lengths = incoming_sizes.tolist()
        incoming = torch.empty(sum(received_lengths), dtype=torch.uint8)
        dist.all_to_all_single(incoming, torch.cat(payloads), received_lengths, sizes.tolist(), group=self._data)
        received = torch.split(incoming, received_lengths)
        return [item for payload in received for item in pickle.loads(payload.numpy().tobytes())]


class SideGroup:
    """The same ranks in a second process group, for a thread that runs beside training; all ranks must create it.

    Its collectives use CPU tensors only, since a waiting GPU is busy. They have the timeout of the default group, and
    cannot be confused with its collectives, even if one of those was cancelled.

    Args:
        fabric: A launched Fabric.
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
        values = [value] * self._size
        dist.all_gather_object(values, value, group=self.group)
        return values

    async def any_async(self, flag: bool) -> bool:
        """Check whether a flag is true on any rank, without blocking the event loop; all ranks must call this."""
        if self.group is None:
            return flag
        wrapped = torch.tensor(float(flag))
        work = dist.all_reduce(wrapped, dist.ReduceOp.MAX, group=self.group, async_op=True)
        while not work.is_completed():
            await asyncio.sleep(POLL_SECONDS)
        work.wait()
        return bool(wrapped)

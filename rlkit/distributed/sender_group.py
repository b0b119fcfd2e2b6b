"""A process group of this rank and of processes that are no ranks, to which it sends tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d


class SenderGroup:
    """The group, whose first member this rank is.

    Args:
        backend: nccl or gloo.
        address: Where the others connect to: a host and a port of this machine.
        world: Members, with this rank.
        name: The group's.
        seconds: How long the others are waited for.
    """

    def __init__(self, backend: str, address: tuple[str, int], world: int, name: Any, seconds: float) -> None:
        limit = timedelta(seconds=seconds)
        # not by c10d.rendezvous, which under torchrun takes the store for one that torchrun serves
        store = dist.TCPStore(*address, world, is_master=True, timeout=limit, multi_tenant=True)  # type: ignore[attr-defined]
        prefixed = c10d.PrefixStore(name, store)
        with _unbound():
            group, _ = c10d._new_process_group_helper(
                world, 0, [], c10d.Backend(backend), prefixed, name, timeout=limit
            )
        c10d._world.pg_group_ranks[group] = {i: i for i in range(world)}
        self._group = group

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Send tensors to the other members, who must know their shapes and types."""
        for tensor in tensors:
            dist.broadcast(tensor, src=0, group=self._group)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self._group)


@contextmanager
def _unbound() -> Iterator[None]:
    """Keep torch from splitting the new group off the trainer's, which would wait for all of the trainer's ranks."""
    own: Any = dist.group.WORLD if dist.is_initialized() else None
    if own is None or own.bound_device_id is None:
        yield
        return
    bound, own.bound_device_id = own.bound_device_id, None
    try:
        yield
    finally:
        own.bound_device_id = bound

"""A process group in which this rank sends tensors to processes outside the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d


def rendezvous_store(host: str) -> Any:
    """Return a store of this process at which others form a process group; it has a `port`."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


class SenderGroup:
    """The process group; this rank is its first member.

    Args:
        backend: nccl or gloo.
        address: Host and port of this machine to which the other members connect.
        world: Number of members, including this rank.
        name: Name of the group.
        seconds: Timeout for the other members to connect, and of broadcasts.
    """

    def __init__(self, backend: str, address: tuple[str, int], world: int, name: Any, seconds: float) -> None:
        limit = timedelta(seconds=seconds)
        # c10d.rendezvous would expect, under torchrun, that torchrun serves the store
        store = dist.TCPStore(*address, world, is_master=True, timeout=limit, multi_tenant=True)  # type: ignore[attr-defined]
        prefixed = c10d.PrefixStore(name, store)
        with _unbound():
            group, _ = c10d._new_process_group_helper(
                world, 0, [], c10d.Backend(backend), prefixed, name, timeout=limit
            )
        c10d._world.pg_group_ranks[group] = {i: i for i in range(world)}
        self._group = group

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Send tensors to the other members, which must know their shapes and types."""
        for tensor in tensors:
            dist.broadcast(tensor, src=0, group=self._group)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self._group)


@contextmanager
def _unbound() -> Iterator[None]:
    """Keep torch from splitting the new group off the trainer's, which would block until all its ranks take part."""
    world: Any = dist.group.WORLD if dist.is_initialized() else None
    if world is None or world.bound_device_id is None:
        yield
        return
    device_id = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device_id

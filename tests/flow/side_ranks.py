"""Run by torchrun on two ranks: what event loops agree on never matches a collective of the main threads."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from rlkit import recipe as sections
from rlkit.distributed.fsdp2 import make_fabric
from rlkit.distributed.ranks import Ranks, SideGroup
from rlkit.rollout.loop import EventLoop

DEADLINE = 5.0


async def agree_and_count(side: SideGroup, flag: bool) -> tuple[bool, int]:
    """Return what the ranks agree on, and how often another task ran meanwhile."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    try:
        return await side.any_async(flag), ticks
    finally:
        ticking.cancel()


def sums(ranks: Ranks) -> list[Any]:
    """Return what three collectives of the main thread find."""
    index = ranks.fabric.global_rank
    return [ranks.all_reduce_max(10.0 + index), ranks.gather_world(index), ranks.same(index)]


if __name__ == "__main__":
    fabric = make_fabric(sections.Fabric("cpu", 2, strategy="ddp"), DEADLINE)
    fabric.launch()
    ranks, side, loop = Ranks(fabric), SideGroup(fabric), EventLoop(lambda: None)
    first = fabric.is_global_zero

    # the first rank's loop asks before its main thread's collectives, the second's after them
    asked = loop.submit(agree_and_count(side, False)) if first else None
    time.sleep(0.3 if first else 0.0)
    assert sums(ranks) == [11.0, [0, 1], 0]
    time.sleep(0.0 if first else 0.5)
    found, ticks = (asked or loop.submit(agree_and_count(side, True))).result()
    assert found
    assert ticks > 10 or not first  # it waited for the second rank for 0.5 s

    # one that was cancelled halfway is none of the main thread's
    if first:
        abandoned = loop.submit(side.any_async(True))
        time.sleep(0.1)
        loop.cancel(abandoned)
    assert sums(ranks) == [11.0, [0, 1], 0]

    # a rank that never asks is waited for as long as the run's deadline says
    late, start = SideGroup(fabric), time.monotonic()
    if first:
        with pytest.raises(RuntimeError):
            loop.run(late.any_async(False))
        assert DEADLINE / 2 < time.monotonic() - start < 4 * DEADLINE
        print("agreed")
    else:
        time.sleep(2 * DEADLINE)
    loop.close()

"""Run by torchrun on two ranks: what event loops agree on never matches a collective of the main threads."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from rlkit import recipe as sections
from rlkit.distributed.fsdp2 import make_fabric
from rlkit.distributed.ranks import Ranks, SideGroup
from rlkit.rollout.loop import EventLoop

DEADLINE = 20.0
GOES_ON, AGREED = Path("goes_on"), Path("agreed")


async def agree(side: SideGroup) -> bool:
    """Return what the ranks agree on; say that the loop goes on meanwhile."""
    agreed = asyncio.create_task(side.any_async(False))
    await asyncio.sleep(0.3)
    GOES_ON.touch()
    return await agreed


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


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
    asked = loop.submit(agree(side)) if first else None
    wait_for(GOES_ON)
    assert sums(ranks) == [11.0, [0, 1], 0]
    assert (asked or loop.submit(side.any_async(True))).result()

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
        assert time.monotonic() - start > DEADLINE / 2
        AGREED.touch()
        print("agreed")
    else:
        wait_for(AGREED)
    loop.close()

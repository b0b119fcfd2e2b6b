"""Dividing a step's trajectories among ranks by their length, so that none waits long for another while learning."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rlkit.distributed.ranks import Ranks
from rlkit.train.metrics import Meter
from rlkit.types import Trajectory


def assign(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return each group a rank: the largest first, each to the rank with the least so far (Graham 1969)."""
    loads, chosen = [0] * ranks, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        chosen[i] = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[chosen[i]] += sizes[i]
    return chosen


def plan(ranks: Ranks, sampled: Sequence[Trajectory], meter: Meter) -> list[list[int]]:
    """Assign whole groups to ranks, all ranks alike; log how uneven the work was, and is.

    Returns:
        For each rank the places in `sampled` of the trajectories that it learns from.
    """
    if ranks.count == 1:
        return [list(range(len(sampled)))]
    sizes: dict[int, int] = defaultdict(int)
    for trajectory in sampled:
        sizes[trajectory.group] += len(trajectory.tokens)
    known = ranks.gather_dp(dict(sizes))
    everything = sorted((group, size) for mine in known for group, size in mine.items())
    rank_of = dict(zip((g for g, _ in everything), assign([s for _, s in everything], ranks.count), strict=True))
    before = [sum(mine.values()) for mine in known]
    after = [sum(size for group, size in everything if rank_of[group] == rank) for rank in range(ranks.count)]
    for name, loads in (("before", before), ("after", after)):
        meter.max(f"imbalance/{name}", max(loads) * ranks.count / max(sum(loads), 1))
    return [[i for i, t in enumerate(sampled) if rank_of[t.group] == rank] for rank in range(ranks.count)]

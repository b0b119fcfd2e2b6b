"""Filters of groups."""

from __future__ import annotations

from collections.abc import Sequence

from rlkit.interfaces.filter import GroupFilter
from rlkit.ranges import Repeats
from rlkit.types import Trajectory


class ZeroSignal(GroupFilter):
    """Drops groups whose rewards are all equal: their advantage is 0.

    Source: dynamic sampling of DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.2).

    Args:
        max_refills: How many times a dropped group's place is filled with another prompt; 0 leaves it empty.
        part: Compare this part of the reward instead of the whole, such as `accuracy`.
    """

    def __init__(self, max_refills: Repeats = 0, part: str | None = None) -> None:
        self.max_refills = max_refills
        self.part = part

    def keep(self, group: Sequence[Trajectory]) -> bool:
        scored = [t for t in group if t.score is not None]
        values = [t.reward if self.part is None or t.score is None else t.score.parts.get(self.part) for t in scored]
        return len(set(values)) > 1

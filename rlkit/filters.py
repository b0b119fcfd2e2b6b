"""Group filters: one a file."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from rlkit.base.ranges import Repeats
from rlkit.interfaces.filter import GroupFilter
from rlkit.types import Trajectory

__all__ = ["ZeroSignal"]


class ZeroSignal(GroupFilter):
    """Drops groups whose rewards are all equal, in float32 as the advantage reads them: it is 0.

    Source: dynamic sampling of DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.2).

    Args:
        max_refills: How many times a dropped group's place is filled with another prompt; 0 leaves it empty.
        component: Compare this component of the reward instead of the whole, such as `accuracy`.
    """

    def __init__(self, max_refills: Repeats = 0, component: str | None = None) -> None:
        self.max_refills = max_refills
        self.component = component

    def keep(self, group: Sequence[Trajectory]) -> bool:
        name = self.component
        values = [t.reward if name is None else t.score.components.get(name) for t in group if t.score is not None]
        return len({*array("f", (value for value in values if value is not None))}) > 1

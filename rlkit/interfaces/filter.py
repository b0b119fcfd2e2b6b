"""The interface of group filters: which groups to train on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from rlkit.interfaces.runtime import RunPart
from rlkit.types import Trajectory


class GroupFilter(RunPart):
    """Keeps or drops the scored samples of one prompt.

    `max_refills` is how many times another prompt replaces a dropped one; with 0, nothing does.
    """

    max_refills: int = 0

    @abstractmethod
    def keep(self, group: Sequence[Trajectory]) -> bool:
        """Whether to train on this group; all its scores have a reward."""

"""Groups that are trained on more than once while they are young enough: `rollout.replay`."""

from __future__ import annotations

from collections.abc import Iterable

from rlkit.train.ahead.group import PromptGroup


class ReplayBuffer:
    """Keeps the youngest groups that were trained on; each step trains on all of them again.

    Which these are follows from what was trained on alone. No checkpoint has them: a resumed run begins with an empty
    buffer, so that no group is trained on more than `1 + reuse` times.

    Args:
        size: Groups at most.
        reuse: How often a group is trained on again, at most.
        staleness: The largest age of a group that is trained on.
    """

    def __init__(self, size: int, reuse: int, staleness: int) -> None:
        self.size, self.reuse, self.staleness = size, reuse, staleness
        self.groups: list[PromptGroup] = []

    def draw(self) -> list[PromptGroup]:
        """Return the groups to train on again, the youngest first; what has no reward is left out."""
        self.groups = [group for group in self.groups if group.scored]
        for group in self.groups:
            group.again += 1
        return list(self.groups)

    def add(self, groups: Iterable[PromptGroup], version: int) -> None:
        """Add the groups that weights of a version are trained on, and keep what the next version may be trained on."""
        young = [
            group
            for group in (*self.groups, *groups)
            if group.complete and group.again < self.reuse and version + 1 - group.oldest <= self.staleness
        ]
        self.groups = sorted(young, key=lambda group: (-group.oldest, group.position))[: self.size]

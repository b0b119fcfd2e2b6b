"""The samples of a prompt while rollouts run ahead, and of those that took its position after a filter dropped it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from rlkit.interfaces.filter import GroupFilter
from rlkit.train.metrics import has_no_opinion
from rlkit.train.rollouts import Rollouts
from rlkit.train.sampling import passes
from rlkit.types import Prompt, Trajectory


@dataclass
class PromptGroup:
    """A position in the order of the data, and what was sampled for it.

    `trajectories` may be trained on; `oldest` is the version of the oldest token of these. `filtered` are those of
    prompts that the filter dropped, `verdicts` its verdict on each prompt: 1 for one that it dropped. `greedy` is a
    greedy answer, where the estimator needs it. `busy` counts the conversations that may not have ended: one of them
    counts until it is known what follows from the group's end. `again` is how often the group was trained on after the
    first time.
    """

    position: int
    prompt: Prompt
    oldest: int = 0
    trajectories: list[Trajectory] = field(default_factory=list)
    greedy: Trajectory | None = None
    scoring: asyncio.Task[None] | None = None
    filtered: list[Trajectory] = field(default_factory=list)
    verdicts: list[tuple[Prompt, float]] = field(default_factory=list)
    attempts: int = 0
    busy: int = 1
    again: int = 0

    @property
    def complete(self) -> list[Trajectory]:
        """Those that did not fail, and on which the reward may have an opinion."""
        return [t for t in self.trajectories if t.error is None and not has_no_opinion(t)]

    @property
    def scored(self) -> bool:
        """Whether there is something to train on, all of it with a reward."""
        return bool(self.complete) and all(t.reward is not None for t in self.complete)

    def add_to(self, rollouts: Rollouts, slot: int) -> None:
        """Add the group to a step's rollouts, under its index in the step."""
        if self.scoring is not None:
            rollouts.scoring.adopt(self.scoring)
        if self.greedy is not None:
            rollouts.greedy_completions[slot] = self.greedy
        trajectories = [*self.trajectories, *self.filtered]
        for trajectory in trajectories:
            trajectory.group = slot
        rollouts.all += trajectories
        rollouts.sampled += self.complete

    def add_again_to(self, rollouts: Rollouts, slot: int) -> None:
        """Add the group to a step that trains on it again; it counts in no metric of what was sampled."""
        if self.greedy is not None:
            rollouts.greedy_completions[slot] = self.greedy
        rollouts.sampled += [replace(t, group=slot, credit={"again": self.again}) for t in self.complete]

    def oldest_token(self, version: int) -> int:
        """Return the version of the oldest token that may be trained on; `version` if there is no such token."""
        samples = (sample for t in self.trajectories for sample in t.samples)
        return min((v for sample in samples for v in sample.versions if v >= 0), default=version)

    async def passes(self, group_filter: GroupFilter) -> bool:
        """Wait for the scores; return whether the filter keeps the group, which is empty if not.

        One without all scores is kept: it is left out once it is trained on, as without a filter.
        """
        if self.scoring is not None:
            await self.scoring
        if not self.scored:
            return True
        keeps = passes(group_filter, self.complete)
        self.verdicts.append((self.complete[0].prompt, float(not keeps)))
        if not keeps:
            self.filtered += self.trajectories
            self.trajectories, self.greedy = [], None
        return keeps

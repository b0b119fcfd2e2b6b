"""Sampling and scoring one group, while rollouts run ahead of the trainer."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import dataclass, replace

from rlkit.base.tasks import run_concurrently
from rlkit.data.data import Data
from rlkit.interfaces.advantage import Needs
from rlkit.rollout.collect import BusyTimer, ConversationSetup, converse
from rlkit.rollout.gate import Gate
from rlkit.rollout.service import RolloutService
from rlkit.train.ahead.group import PromptGroup
from rlkit.train.sampling import score_group
from rlkit.types import Trajectory


@dataclass
class GroupSampler:
    """Samples a group's prompt to its end, over any number of steps, and starts to score it.

    Args:
        data: The prompts.
        service: Samples and scores.
        gate: Interrupts the requests while it is closed.
        timer: Measures how busy the engine is.
        unlimited: Whether `rollout.max_conversations` does not hold. Interrupted conversations would keep their slots,
            for which a validation would wait forever.
    """

    data: Data
    service: RolloutService
    gate: Gate
    timer: BusyTimer
    unlimited: bool

    async def sample(self, group: PromptGroup, attempt: int) -> None:
        """Sample a group's prompt, or a spare one after the first attempt, with a greedy completion where needed."""
        step, slot = divmod(group.position, self.service.recipe.train.prompts_per_step)
        greedy = Needs.GREEDY in self.service.recipe.needs
        if attempt:
            group.prompt = self.data.spare(step + 1, attempt - 1, slot)
        setup = self._setup(step + 1, attempt)
        conversations = [(setup, sample) for sample in range(setup.samples)]
        if greedy:
            conversations.append((replace(setup, sampling=setup.sampling.most_likely(), samples=1), 0))
        self.gate.count(len(conversations) - group.busy)
        group.busy = len(conversations)

        async def sample_one(setup: ConversationSetup, sample: int) -> Trajectory:
            trajectory = await converse(setup, group.prompt, slot, sample)
            if group.busy > 1:  # the last one counts until it is known what follows from the group's end
                group.busy -= 1
                self.gate.count(-1)
            return trajectory

        trajectories = await run_concurrently(*(sample_one(*conversation) for conversation in conversations))
        group.attempts, group.trajectories = attempt + 1, trajectories[: setup.samples]
        group.greedy = trajectories[-1] if greedy else None
        group.scoring = asyncio.create_task(self._score(group))

    def _setup(self, step: int, attempt: int) -> ConversationSetup:
        rollout = self.service.recipe.rollout
        setup = self.service.conversation_setup(
            rollout.sampling, rollout.group_size, step, attempt=attempt, timer=self.timer
        )
        setup = replace(setup, gate=self.gate)
        return replace(setup, admission=nullcontext()) if self.unlimited else setup

    async def _score(self, group: PromptGroup) -> None:
        greedy = [t for t in (group.greedy,) if t is not None and t.error is None]
        await run_concurrently(score_group(self.service, group.complete), score_group(self.service, greedy))

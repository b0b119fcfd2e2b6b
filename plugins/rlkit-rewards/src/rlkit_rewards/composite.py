"""A weighted sum of rewards."""

from __future__ import annotations

import asyncio
from collections import ChainMap
from collections.abc import Sequence

from rlkit.base.errors import RecipeError
from rlkit.base.names import Name
from rlkit.base.ranges import FiniteFloat, Seconds
from rlkit.interfaces.reward import OnError, RewardManager
from rlkit.types import Prompt, Score, Trajectory
from rlkit_rewards.combined import CombinedReward


class Composite(CombinedReward):
    """The sum of weight * reward; each reward is a component of the score, in addition to its own components.

    The final answer is that of the first reward that returns one. A reward without an opinion on a completion (None) is
    left out of its sum and its components; if none has one, neither has this reward.

    Args:
        rewards: Rewards by name.
        weights: Weights by the names of the rewards; 1 by default.
        timeout: Seconds for the samples of one prompt.
        on_error: What happens to a group with a failed score.
    """

    def __init__(
        self,
        rewards: dict[Name, RewardManager],
        weights: dict[str, FiniteFloat] | None = None,
        *,
        timeout: Seconds = 60.0,
        on_error: OnError = "drop",
    ) -> None:
        unknown = sorted(set(weights or {}) - set(rewards))
        if unknown or not rewards:
            names = ", ".join(rewards) or "none"
            raise RecipeError(f"Composite weighs {unknown or 'nothing'}, expected names among its rewards: {names}")
        super().__init__(rewards, timeout, on_error)
        self.weights = weights
        if all(r.components is not None for r in rewards.values()):
            self.components = [*rewards, *(component for r in rewards.values() for component in r.components or ())]

    def unscorable(self, prompt: Prompt) -> str | None:
        return next(filter(None, (reward.unscorable(prompt) for reward in self.rewards.values())), None)

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        calls = (self.runtime.score(reward, trajectories) for reward in self.rewards.values())
        columns = await asyncio.gather(*calls)
        return [self._sum(row) for row in zip(*columns, strict=True)]

    def _sum(self, scores: tuple[Score, ...]) -> Score:
        total = 0.0
        components: dict[str, float] = {}
        for name, score in zip(self.rewards, scores, strict=True):
            if score.error is not None:
                return Score(None, error=f"component {name}: {score.error}")
            components |= score.components
            if score.reward is not None:
                total += self._weight(name) * score.reward
                components[name] = score.reward
        answer = next((score.answer for score in scores if score.answer is not None), None)
        ungradable = any(score.ungradable for score in scores)
        feedback = "\n".join(score.feedback for score in scores if score.feedback) or None
        reward = None if all(score.abstains for score in scores) else total
        turns = self._weighted([score.turn_rewards for score in scores])
        tokens = self._weighted([score.token_rewards for score in scores])
        fields = dict(ChainMap(*(dict(score.fields) for score in scores)))
        return Score(reward, components, turns, None, ungradable, answer, feedback, tokens, fields)

    def _weight(self, name: str) -> float:
        return (self.weights or {}).get(name, 1.0)

    def _weighted(self, rewards: Sequence[list[float] | None]) -> list[float] | None:
        """Return the weighted sum of the rewards of each turn or token; None if no reward has any."""
        weights = [self._weight(name) for name in self.rewards]
        rows = [[weight * x for x in own] for weight, own in zip(weights, rewards, strict=True) if own is not None]
        return [sum(column) for column in zip(*rows, strict=True)] if rows else None

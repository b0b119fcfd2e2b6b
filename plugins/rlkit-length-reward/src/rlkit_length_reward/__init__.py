"""A reward that discourages long completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated

from annotated_types import Ge, Le

from rlkit.base.ranges import LARGEST_FLOAT, NUMBER, NonNegativeFloat, NonNegativeInt, Seconds
from rlkit.hooks import Register, hookimpl
from rlkit.interfaces.reward import OnError, RewardManager
from rlkit.interfaces.runtime import Runtime
from rlkit.types import Prompt, Score, Trajectory


class LengthReward(RewardManager):
    """Another reward, less `penalty` for each token that the policy chose beyond `free_tokens`.

    Args:
        reward: What is rewarded in the first place.
        free_tokens: How many tokens cost nothing.
        penalty: What each further one costs.
        floor: The most that is taken off, as a negative number.
        timeout: Seconds for the samples of one prompt.
        on_error: What becomes of a group with a failed score.
    """

    def __init__(
        self,
        reward: RewardManager,
        *,
        free_tokens: NonNegativeInt = 256,
        penalty: NonNegativeFloat = 0.001,
        floor: Annotated[float, Ge(-LARGEST_FLOAT), Le(0), NUMBER] = -0.5,
        timeout: Seconds = 60.0,
        on_error: OnError = "drop",
    ) -> None:
        self.reward = reward
        self.free_tokens = free_tokens
        self.penalty = penalty
        self.floor = floor
        self.timeout = timeout
        self.on_error = on_error
        self.concurrency = reward.concurrency

    def bind(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.reward.bind(runtime)

    def close(self) -> None:
        self.reward.close()

    def unscorable(self, prompt: Prompt) -> str | None:
        return self.reward.unscorable(prompt)

    def counts(self) -> Mapping[str, float]:
        return self.reward.counts()

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        scores = await self.runtime.score(self.reward, trajectories)
        return [self._shorten(s, t) for s, t in zip(scores, trajectories, strict=True)]

    def _shorten(self, score: Score, trajectory: Trajectory) -> Score:
        if score.reward is None:
            return score
        excess = max(0, trajectory.response_length - self.free_tokens)
        penalty = max(self.floor, -self.penalty * excess)
        return replace(score, reward=score.reward + penalty, components={**score.components, "length_penalty": penalty})


@hookimpl
def rlkit_register(register: Register) -> None:
    register(LengthReward)

"""The reward of runs that are rewarded by turns only."""

from __future__ import annotations

from collections.abc import Sequence

from rlkit.interfaces.reward import RewardManager
from rlkit.types import Score, Trajectory


class EpisodeReward(RewardManager):
    """Adds 0 to the turn rewards of environment, user and tools; `accuracy` is 1 if their sum is above 0, else 0."""

    components = ("accuracy",)

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        return [Score(0.0, {"accuracy": float(sum(t.turn_rewards) > 0)}) for t in trajectories]

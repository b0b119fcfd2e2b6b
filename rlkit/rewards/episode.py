"""The reward of a run whose rewards come on the way."""

from __future__ import annotations

from collections.abc import Sequence

from rlkit.interfaces.reward import RewardManager
from rlkit.types import Score, Trajectory


class EpisodeReward(RewardManager):
    """Adds nothing to what an environment, a user or tools gave turn by turn; `accuracy` is whether that is above 0."""

    components = ("accuracy",)

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        return [Score(0.0, {"accuracy": float(sum(t.turn_rewards) > 0)}) for t in trajectories]

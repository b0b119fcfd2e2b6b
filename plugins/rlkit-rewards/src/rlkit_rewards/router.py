"""A reward chosen by the source of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from rlkit.base.errors import RecipeError
from rlkit.base.ranges import Seconds
from rlkit.interfaces.reward import OnError, RewardManager
from rlkit.types import Prompt, Score, Trajectory
from rlkit_rewards.combined import CombinedReward


class Router(CombinedReward):
    """Scores each prompt by the reward that its `meta[key]` names.

    Args:
        rewards: Rewards by the value that selects them, or by patterns of values, such as `aime*`. A value's own name
            counts first, then the first pattern that matches.
        key: Field of the prompt's metadata.
        default: Name of the reward for prompts with any other value; null makes them an error.
        timeout: Seconds for the samples of one prompt.
        on_error: What happens to a group with a failed score.
    """

    def __init__(
        self,
        rewards: dict[str, RewardManager],
        key: str = "data_source",
        default: str | None = None,
        *,
        timeout: Seconds = 60.0,
        on_error: OnError = "drop",
    ) -> None:
        if not rewards or (default is not None and default not in rewards):
            raise RecipeError(f"Router has default={default!r}, expected a name among: {', '.join(rewards) or 'none'}")
        super().__init__(rewards, timeout, on_error)
        self.key = key
        self.default = default

    def unscorable(self, prompt: Prompt) -> str | None:
        name = self._choose(prompt)
        return None if name is None else self.rewards[name].unscorable(prompt)

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        name = self._choose(trajectories[0].prompt)
        if name is None:
            source = str(trajectories[0].prompt.meta.get(self.key))
            error = f"no reward for {self.key} {source!r}; expected any of: {', '.join(self.rewards)}"
            return [Score(None, error=error) for _ in trajectories]
        return await self.runtime.score(self.rewards[name], trajectories)

    def _choose(self, prompt: Prompt) -> str | None:
        """Return the name of the reward for a prompt; None if no reward matches."""
        source = str(prompt.meta.get(self.key))
        if source in self.rewards:
            return source
        return next((pattern for pattern in self.rewards if fnmatchcase(source, pattern)), self.default)

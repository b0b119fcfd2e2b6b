"""A reward chosen by the source of the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from rlkit.base.errors import RecipeError
from rlkit.base.ranges import Seconds
from rlkit.interfaces.reward import OnError, RewardManager, sum_counts
from rlkit.registry import close_parts
from rlkit.types import Prompt, Score, Trajectory

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime


class Router(RewardManager):
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
        self.rewards = rewards
        self.key = key
        self.default = default
        self.timeout = timeout
        self.on_error = on_error
        limits = [r.concurrency for r in rewards.values() if r.concurrency is not None]
        self.concurrency = max(limits, default=None)
        self.fills = [field for r in rewards.values() for field in r.fills]
        self.reads_fields = [name for r in rewards.values() for name in r.reads_fields]

    def bind(self, runtime: Runtime) -> None:
        self.runtime = runtime
        for reward in self.rewards.values():
            reward.bind(runtime)

    def close(self) -> None:
        close_parts(list(self.rewards.values()))

    def counts(self) -> Mapping[str, float]:
        return sum_counts(self.rewards.values())

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

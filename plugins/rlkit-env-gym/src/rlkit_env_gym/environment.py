"""gymnasium's text environments as episodes of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import gymnasium
from annotated_types import Ge, Le
from rlkit_servers.threads import in_daemon

from rlkit.base.errors import RecipeError
from rlkit.base.ranges import NUMBER, Count, FiniteFloat, Seconds
from rlkit.interfaces.environment import Environment, Observation
from rlkit.interfaces.runtime import Runtime
from rlkit.interfaces.task import Split, Task
from rlkit.interfaces.tool import State
from rlkit.types import Prompt
from rlkit_env_gym.episode import Episode
from rlkit_env_gym.packages import require_supported, suggestion

Rows = Annotated[int, Ge(1), Le(1_000_000), NUMBER]
RESERVED = ("id", "render_mode", "max_episode_steps", "disable_env_checker")
"""Arguments of `gymnasium.make` that are no options of an environment."""
COMPASS = ("left", "down", "right", "up")
NAMES: Mapping[str, Sequence[str]] = {
    "FrozenLake-v1": COMPASS,
    "FrozenLake8x8-v1": COMPASS,
    "CliffWalking-v1": ("up", "right", "down", "left"),
    "CliffWalkingSlippery-v1": ("up", "right", "down", "left"),
    "Taxi-v4": ("south", "north", "east", "west", "pickup", "dropoff"),
}
"""The names of actions in gymnasium's documentation, by environment."""


class GymTask(Task):
    """Prompts that start episodes: each row has the same instructions and plays an episode of its own.

    Args:
        instructions: The system message: the rules, and how to write an action.
        rows: Training prompts.
        validation_rows: Validation prompts; their episodes have other seeds.
    """

    def __init__(
        self,
        instructions: str = "Play the game. Answer each observation with one action and nothing else.",
        rows: Rows = 1000,
        validation_rows: Rows = 100,
    ) -> None:
        self.instructions = instructions
        self.sizes = {"train": rows, "validation": validation_rows}

    def rows(self, split: Split) -> Sequence[Mapping[str, Any]]:
        return [{"id": f"gym-{split}-{i}"} for i in range(self.sizes[split])]

    def prompt(self, row: Mapping[str, Any], index: int) -> Prompt:
        return Prompt(id=row["id"], messages=[{"role": "system", "content": self.instructions}])


class GymText(Environment):
    """Plays an environment of gymnasium in text: its observations are texts, or it renders as `ansi`.

    Actions are those of a Text or a Discrete space. The policy writes one as `<action>left</action>` or as its complete
    turn. What is no action is answered with what was expected, and is no step of the environment. Rewards of the
    environment are credited to the turn; termination and truncation end the episode.

    The environment must be registered with gymnasium, by gymnasium itself or by an installed plugin that imports its
    package.

    Args:
        id: Such as `FrozenLake-v1`, `Taxi-v4`, `CliffWalking-v1`.
        options: Arguments of the environment, such as `{is_slippery: false}`.
        actions: The names of a Discrete space's actions, in order; null for those in gymnasium's documentation, or
            numbers.
        max_steps: Steps until the episode is truncated; null for the environment's own limit.
        max_unreadable: After so many turns without an action the episode is over.
        unreadable_reward: Reward for a turn without an action.
        timeout: Seconds for one step.
    """

    def __init__(
        self,
        id: str = "FrozenLake-v1",
        options: dict[str, Any] | None = None,
        actions: list[str] | None = None,
        *,
        max_steps: Count | None = None,
        max_unreadable: Count = 3,
        unreadable_reward: FiniteFloat = 0.0,
        timeout: Seconds = 30.0,
    ) -> None:
        require_supported("gymnasium")
        self.id = id
        self.options = dict(options or {})
        self.actions = actions
        self.max_steps = max_steps
        self.max_unreadable = max_unreadable
        self.unreadable_reward = unreadable_reward
        self.timeout = timeout
        self._check()

    def _check(self) -> None:
        if ":" in self.id:
            raise RecipeError(
                f"GymText has id={self.id!r}, but a recipe imports no module; import "
                f"{self.id.partition(':')[0]!r} in a plugin of your own, and write id={self.id.rpartition(':')[2]!r}"
            )
        if self.id not in gymnasium.registry:
            hint = suggestion(self.id, gymnasium.registry)
            raise RecipeError(f"GymText has id={self.id!r}, which is not registered with gymnasium; {hint}")
        reserved = [name for name in self.options if name in RESERVED]
        if reserved:
            raise RecipeError(f"GymText has the options {', '.join(reserved)}, which it sets itself; remove them")

    def bind(self, runtime: Runtime) -> None:
        """Check that the environment can be made and speaks text.

        Raises:
            RecipeError: It cannot, or has other spaces.
        """
        self._episode().try_out()

    def _episode(self) -> Episode:
        names = NAMES.get(self.id) if self.actions is None else self.actions
        return Episode(self.id, self.options, names, self.max_steps)

    async def reset(self, prompt: Prompt, seed: int, state: State) -> str:
        episode = self._episode()
        state.update(episode=episode, unreadable=0)
        return await in_daemon(lambda: episode.start(seed))

    async def step(self, action: str, state: State) -> Observation:
        episode: Episode = state["episode"]
        choice = episode.read(action)
        if choice is not None:
            return await in_daemon(lambda: episode.step(choice))
        state["unreadable"] += 1
        text = f"That is no action, expected {episode.expected}."
        return Observation(text, self.unreadable_reward, done=state["unreadable"] >= self.max_unreadable)

    async def finish(self, state: State) -> None:
        episode: Episode | None = state.pop("episode", None)
        if episode is not None:
            await in_daemon(episode.close)

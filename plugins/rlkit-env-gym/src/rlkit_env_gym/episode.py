"""One episode of an environment of gymnasium, in blocking calls."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.spaces import Text

from rlkit.base.errors import RecipeError, explain, show
from rlkit.interfaces.environment import Observation
from rlkit_env_gym.spaces import Actions, plain

SEEDS = 2**31
"""The seeds that random generators of all kinds accept."""


class Episode:
    """Makes an environment, plays one episode in it, and closes it.

    Args:
        id: The environment's.
        options: Arguments of its constructor.
        names: The names of its actions; None for none.
        max_steps: Steps until it is truncated; None for its own limit.
    """

    def __init__(self, id: str, options: Mapping[str, Any], names: Sequence[str] | None, max_steps: int | None) -> None:
        self.id = id
        self.options = options
        self.names = names
        self.max_steps = max_steps
        self._env: gymnasium.Env[Any, Any] | None = None
        self._actions: Actions | None = None
        self._closed = False
        self._lock = threading.Lock()

    @property
    def expected(self) -> str:
        """What an action is, in words."""
        return "a started episode" if self._actions is None else self._actions.description

    def read(self, text: str) -> int | str | None:
        """Return the action that a text states, None if there is none."""
        return None if self._actions is None else self._actions.read(text)

    def try_out(self) -> None:
        """Make the environment and close it.

        Raises:
            RecipeError: It cannot be made, or its observations or actions are no text.
        """
        try:
            self._open()
        except RecipeError as error:
            raise RecipeError(f"GymText cannot play {self.id}: {error}") from error
        except Exception as error:  # the environment's own code
            raise RecipeError(f"GymText cannot make {self.id}: {explain(error)}; check its `options`") from error
        finally:
            self.close()

    def start(self, seed: int) -> str:
        """Return the first observation, and what an action is."""
        env = self._open()
        observation, _ = env.reset(seed=seed % SEEDS)
        return f"{self._text(observation)}\nYour action: {self.expected}."

    def step(self, action: int | str) -> Observation:
        """Return the observation after an action."""
        if self._env is None:
            raise RuntimeError("the episode is over")
        observation, reward, terminated, truncated, _ = self._env.step(action)
        return Observation(self._text(observation), float(reward), done=bool(terminated or truncated))

    def close(self) -> None:
        """Close the environment, now or as soon as it is made."""
        with self._lock:
            env, self._env, self._closed = self._env, None, True
        if env is not None:
            env.close()

    def _open(self) -> gymnasium.Env[Any, Any]:
        env = self._make()
        try:
            if not isinstance(env.observation_space, Text):
                modes = env.metadata.get("render_modes") or ()
                if "ansi" not in modes:
                    raise RecipeError(
                        f"its observations are {env.observation_space}, its render modes {', '.join(modes) or 'none'}; "
                        "expected observations that are Text, or the render mode ansi"
                    )
                env.close()
                env = self._make(render_mode="ansi")
            self._actions = Actions(env.action_space, self.names)
        except BaseException:
            env.close()
            raise
        with self._lock:
            self._env = env
        if self._closed:  # while it was made
            self.close()
            raise RuntimeError("the episode is over")
        return env

    def _make(self, **rendering: str) -> gymnasium.Env[Any, Any]:
        return gymnasium.make(self.id, self.max_steps, disable_env_checker=True, **rendering, **self.options)

    def _text(self, observation: object) -> str:
        if isinstance(observation, str):
            return observation
        rendering = None if self._env is None else self._env.render()
        if not isinstance(rendering, str):
            raise TypeError(f"{self.id} rendered {show(rendering)}, expected text")
        return plain(rendering)

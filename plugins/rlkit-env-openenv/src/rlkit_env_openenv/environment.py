"""Environments of OpenEnv servers as episodes of a conversation."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from rlkit.base.deadlines import queued
from rlkit.base.errors import RecipeError
from rlkit.base.ranges import Count, FiniteFloat, Seconds
from rlkit.interfaces.environment import Environment, Observation
from rlkit.interfaces.runtime import Runtime
from rlkit.interfaces.tool import State
from rlkit.types import Prompt
from rlkit_env_openenv.actions import ActionReader, text_of
from rlkit_env_openenv.connection import EpisodeConnection, ServerError, action_schema

SEEDS = 2**31
REFUSED = "VALIDATION_ERROR"
FULL = "CAPACITY_REACHED"


class OpenEnv(Environment):
    """Plays the environment of a running OpenEnv server, each episode in a session of its own.

    The policy writes an action as `<action>…</action>` or as its complete turn: a JSON object with the fields of the
    server's schema, or the value of one field. What is no action, or is refused by the server, is answered with what
    was expected, and is no step of the environment. Rewards are credited to the turn; `done` ends the episode. If the
    server dies, is slow or answers nonsense, the conversation fails, and others go on.

    Args:
        url: The server's address, such as `http://127.0.0.1:8000`.
        action: The field that a turn without JSON is; null for the one that the schema requires.
        observation: The field that the policy reads; null for the only one if it is text, else all as JSON.
        sessions: Most episodes at once: the server's `max_concurrent_envs`, divided by the ranks of the run.
        max_unreadable: After so many turns without an action the episode is over.
        unreadable_reward: Reward for a turn without an action.
        timeout: Seconds for one step.
    """

    def __init__(
        self,
        url: str,
        action: str | None = None,
        observation: str | None = None,
        *,
        sessions: Count = 1,
        max_unreadable: Count = 3,
        unreadable_reward: FiniteFloat = 0.0,
        timeout: Seconds = 30.0,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RecipeError(f"OpenEnv has url={url!r}, expected such as http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self.action = action
        self.observation = observation
        self.sessions = sessions
        self.max_unreadable = max_unreadable
        self.unreadable_reward = unreadable_reward
        self.timeout = timeout
        self._free = asyncio.Semaphore(sessions)

    def bind(self, runtime: Runtime) -> None:
        """Read what an action is from the server.

        Raises:
            RecipeError: The server is of another version, or its actions have no such field.
        """
        self._actions = ActionReader(action_schema(self.url), self.action)

    async def reset(self, prompt: Prompt, seed: int, state: State) -> str:
        with queued():
            await self._free.acquire()
        connection = EpisodeConnection(self.url)
        state.update(connection=connection, unreadable=0)
        await connection.open()
        try:
            result = await connection.ask("reset", {"seed": seed % SEEDS} | (prompt.meta.get("reset") or {}))
        except ServerError as error:
            if error.code == FULL:
                raise RuntimeError(f"{error}; set `sessions` of OpenEnv to what the server allows") from error
            raise
        if result.done:
            raise ValueError("the episode is over after its reset, before any action")
        return f"{text_of(result.observation, self.observation)}\nYour action: {self._actions.expected}."

    async def step(self, action: str, state: State) -> Observation:
        fields = self._actions.read(action)
        if fields is None:
            return self._unreadable(state)
        try:
            result = await state["connection"].ask("step", fields)
        except ServerError as error:
            if error.code == REFUSED:
                return self._unreadable(state)
            raise
        return Observation(text_of(result.observation, self.observation), result.reward, result.done)

    def _unreadable(self, state: State) -> Observation:
        state["unreadable"] += 1
        text = f"That is no action, expected {self._actions.expected}."
        return Observation(text, self.unreadable_reward, done=state["unreadable"] >= self.max_unreadable)

    async def finish(self, state: State) -> None:
        connection: EpisodeConnection | None = state.pop("connection", None)
        if connection is not None:
            try:
                await connection.close()
            finally:
                self._free.release()

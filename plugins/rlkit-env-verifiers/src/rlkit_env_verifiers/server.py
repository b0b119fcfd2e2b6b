"""Serves an environment on an event loop of its own: its code may block, which must not stop all rollouts."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rlkit.interfaces.agent import AgentClient

if TYPE_CHECKING:
    from verifiers.v1 import Env, Episode, Task

NO_KEY = "RLKIT_VERIFIERS_NO_KEY"
"""A variable that is not set: a session's address holds its key."""
CLOSE_SECONDS = 10.0


class EnvironmentServer:
    """Holds an environment's tool servers from its start to `close`, in a daemon thread."""

    def __init__(self, env: Env[Any]) -> None:
        self._env = env
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="verifiers", daemon=True)
        self._thread.start()

    async def play(self, task: Task, client: AgentClient) -> Episode:
        """Return an episode in which the policy is asked at a client's address.

        Raises:
            Exception: The environment cannot be served.
        """
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        await asyncio.shield(asyncio.wrap_future(self._ready))
        policy = EvalClientConfig(base_url=address(client), api_key_var=NO_KEY)
        episode = self._env.run_episode(task, ModelContext(client.model, policy))
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(episode, self._loop))

    def close(self) -> None:
        """Cancel all episodes and end the tool servers."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        try:
            async with self._env.serving():
                self._env._interception = None  # then each rollout has its own, which closes its connections
                self._ready.set_result(None)
                await self._stop.wait()
        except Exception as error:  # the environment's own code
            if not self._ready.done():
                self._ready.set_exception(error)


def address(client: AgentClient) -> str:
    """Return the base URL of a session; no header need name it."""
    return f"{client.url}/sessions/{client.key}/v1"

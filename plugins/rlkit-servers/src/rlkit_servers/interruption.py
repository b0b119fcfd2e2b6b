"""Interrupting requests in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

from rlkit_servers.http import Fault
from rlkit_servers.server import InferenceServer

T = TypeVar("T")

ABORT_SECONDS = 10.0
"""Time limit of a server's response to an abort."""

REPEAT_SECONDS = 0.05
"""Pause between two aborts: the first may overtake a request on its way to the server."""


class Interruption:
    """Interrupts requests: aborts those that a server has, and cancels those that still wait."""

    def __init__(self) -> None:
        self._in_server: dict[asyncio.Task[object], bool] = {}
        self._ending: asyncio.Task[None] | None = None

    async def watch(self, work: Coroutine[object, None, T]) -> T | None:
        """Return the result of a request; None if it was interrupted before a server had it."""
        task, caller = asyncio.create_task(work), asyncio.current_task()
        self._in_server[task] = False
        try:
            return await task
        except asyncio.CancelledError:
            if caller is not None and caller.cancelling():
                raise
            return None
        finally:
            del self._in_server[task]

    @contextmanager
    def in_server(self) -> Iterator[None]:
        """Mark the current task's request as being in a server."""
        task = asyncio.current_task()
        assert task is not None
        self._in_server[task] = True
        try:
            yield
        finally:
            self._in_server[task] = False

    def interrupt(self, servers: Sequence[InferenceServer]) -> None:
        """Interrupt all requests, whether one of these servers has them or none."""
        self._ending = asyncio.create_task(self._end(set(self._in_server), servers))

    async def _end(self, tasks: set[asyncio.Task[object]], servers: Sequence[InferenceServer]) -> None:
        while unfinished := tasks & self._in_server.keys():
            for task in unfinished:
                if not self._in_server[task]:
                    task.cancel()
            for server in servers:
                with suppress(Fault):  # its requests fail too, and are then cancelled
                    await server.api.abort(ABORT_SECONDS)
            await asyncio.sleep(REPEAT_SECONDS)

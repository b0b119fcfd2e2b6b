"""Noticing that a server hangs while it has requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from rlkit.engines.server.http import Fault


class Hung(Fault):
    """A server with requests in flight does not respond to health checks."""


class HealthWatch:
    """Checks a server's health as long as requests are in flight.

    Args:
        healthy: Returns whether the server is healthy.
        interval: Seconds between two checks.
    """

    def __init__(self, healthy: Callable[[], Awaitable[bool]], interval: float) -> None:
        self._healthy = healthy
        self._interval = interval
        self._requests = 0
        self._task: asyncio.Task[None] | None = None
        self._hung: asyncio.Future[None] | None = None

    @contextmanager
    def request(self) -> Iterator[asyncio.Future[None]]:
        """Watch the server during a request; yields a future that is done once the server is not healthy."""
        self._requests += 1
        if self._hung is None or self._task is None or self._task.done():
            self._hung = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._watch(self._hung))
        try:
            yield self._hung
        finally:
            self._requests -= 1

    def stop(self) -> None:
        """Stop watching; requests in flight count as hung."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._hung is not None and not self._hung.done():
            self._hung.set_result(None)

    async def _watch(self, hung: asyncio.Future[None]) -> None:
        while self._requests:
            await asyncio.sleep(self._interval)
            if not await self._healthy() and not hung.done():
                hung.set_result(None)
                return

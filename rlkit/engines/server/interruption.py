"""Requests that end before their answers are whole."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from rlkit.engines.server.http import Fault
from rlkit.engines.server.node import Node

T = TypeVar("T")

ABORT_SECONDS = 10.0
"""For a server's answer to an abort."""

AGAIN_SECONDS = 0.05
"""Between two aborts: a request may have been on its way to the server at the first."""


class Interruption:
    """Requests in flight: those that a server has are aborted there, all others are cancelled."""

    def __init__(self) -> None:
        self._in_server: dict[asyncio.Task[Any], bool] = {}
        self._ending: asyncio.Task[None] | None = None

    async def watch(self, work: Coroutine[object, None, T]) -> T | None:
        """Return what a request's work returns; None where it was interrupted while no server had it."""
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
        """Note that a server has the request of the current task."""
        task = asyncio.current_task()
        assert task is not None
        self._in_server[task] = True
        try:
            yield
        finally:
            self._in_server[task] = False

    def begin(self, nodes: Sequence[Node]) -> None:
        """Interrupt all requests that these servers have, or none."""
        self._ending = asyncio.create_task(self._end(set(self._in_server), nodes))

    async def _end(self, tasks: set[asyncio.Task[Any]], nodes: Sequence[Node]) -> None:
        while left := tasks & self._in_server.keys():
            for task in left:
                if not self._in_server[task]:
                    task.cancel()
            for node in nodes:
                with suppress(Fault):  # its requests fail as well, and are cancelled then
                    await node.api.abort(ABORT_SECONDS)
            await asyncio.sleep(AGAIN_SECONDS)

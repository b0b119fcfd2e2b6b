"""The event loop on which rollouts and rewards run."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoop:
    """Runs coroutines to their end, in the caller's thread."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._runner.get_loop().set_exception_handler(_ignore_interrupts)

    def run(self, work: Coroutine[object, None, T]) -> T:
        """Return what the work returns; tasks that it leaves behind go on with the next call."""
        return self._runner.run(work)

    def close(self) -> None:
        """Cancel what is still running, without a report of it."""
        self._runner.get_loop().set_exception_handler(lambda *_: None)
        self._runner.close()


def _ignore_interrupts(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report what no task has handled, except a Ctrl-C, which the run itself handles."""
    if not isinstance(context.get("exception"), KeyboardInterrupt):
        loop.default_exception_handler(context)

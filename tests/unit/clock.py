"""An event loop with real threads, processes and connections, on a clock that tests move on.

A deadline that is to pass is long, and passes once the test says so; no other one does, however slow the machine is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


class SkippingLoop(asyncio.SelectorEventLoop):
    """Runs one coroutine."""

    _skipped = 0.0

    def time(self) -> float:
        return super().time() + self._skipped

    def skip(self, seconds: float) -> None:
        """Move the clock on."""
        self._skipped += seconds

    def skip_from_thread(self, seconds: float) -> None:
        """Move the clock on from another thread, after the loop has seen what came before."""

        async def skip() -> None:
            self.skip(seconds)

        asyncio.run_coroutine_threadsafe(skip(), self).result(60)

    def run(self, work: Coroutine[object, None, T]) -> T:
        """Return what the work returns, and close the loop."""
        with asyncio.Runner(loop_factory=lambda: self) as runner:
            return runner.run(work)

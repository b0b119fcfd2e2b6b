"""The boundary at which foreign code is awaited: what it does wrong is an error with a text; its time is its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from rlkit.errors import RolloutError, explain

T = TypeVar("T")


class GuardError(Exception):
    """Foreign code raised, or took longer than it may; the message says which."""


async def guard(work: Callable[[], Awaitable[T]], timeout: float) -> T:
    """Call foreign code and await it within its deadline, which stands still while the code is `paused`.

    Args:
        work: Makes what is awaited; what it raises counts as the code's.
        timeout: Seconds.

    Raises:
        GuardError: It raised, or took too long.
        RolloutError: Passed on: the run's own.
    """
    try:
        async with asyncio.timeout(timeout) as deadline:
            clock = _Clock(deadline)
            token = _current.set(clock)
            try:
                return await work()
            finally:
                _current.reset(token)
                clock.stopped = True
    except RolloutError:
        raise
    except Exception as error:  # foreign code may raise anything
        if isinstance(error, TimeoutError) and deadline.expired():
            raise GuardError(f"did not finish within {timeout:g} s") from error
        raise GuardError(explain(error)) from error


@contextmanager
def paused() -> Iterator[None]:
    """Stop the clock of the guarded code that this is called from, if there is any.

    For calls that may wait in a queue, and whose work has a deadline of its own.
    """
    clock = _current.get()
    if clock is None:
        yield
        return
    clock.pause()
    try:
        yield
    finally:
        clock.resume()


class _Clock:
    """A deadline that stands still while at least one call of its code waits."""

    def __init__(self, deadline: asyncio.Timeout) -> None:
        self.stopped = False
        self._deadline = deadline
        self._waiting = 0
        self._left = 0.0

    def pause(self) -> None:
        self._waiting += 1
        when = self._deadline.when()
        if self._waiting == 1 and when is not None and not self._over:
            self._left = when - asyncio.get_running_loop().time()
            self._deadline.reschedule(None)

    def resume(self) -> None:
        self._waiting -= 1
        if self._waiting == 0 and not self._over:
            self._deadline.reschedule(asyncio.get_running_loop().time() + self._left)

    @property
    def _over(self) -> bool:
        return self.stopped or self._deadline.expired()


_current: ContextVar[_Clock | None] = ContextVar("rlkit_clock", default=None)

"""Deadlines that count work alone: time in a queue, and what has a deadline of its own, does not count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import TypeVar

T = TypeVar("T")


@asynccontextmanager
async def deadline(seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Limit work in seconds, without the time in which it is `queued` or `paused`; None for no limit.

    Raises:
        TimeoutError: The work took longer.
    """
    async with asyncio.timeout(seconds) as timeout:
        clock = _Clock(timeout, _current.get())
        token = _current.set(clock)
        try:
            yield timeout
        finally:
            _current.reset(token)
            clock.ended = True


def queued() -> AbstractContextManager[None]:
    """Stop the clocks of all deadlines around the caller: for time in a queue, in which no work is done."""
    clock = _current.get()
    return nullcontext() if clock is None else _all_stopped(clock)


@contextmanager
def _all_stopped(clock: _Clock | None) -> Iterator[None]:
    with ExitStack() as stack:
        while clock is not None:
            stack.enter_context(clock.stopped())
            clock = clock.enclosing
        yield


@asynccontextmanager
async def slot(slots: asyncio.Semaphore) -> AsyncIterator[None]:
    """Hold one of some slots; the wait for it counts in no deadline."""
    with queued():
        await slots.acquire()
    try:
        yield
    finally:
        slots.release()


def paused() -> AbstractContextManager[None]:
    """Stop the clock of the innermost deadline around the caller: for work that has a deadline of its own."""
    clock = _current.get()
    return nullcontext() if clock is None else clock.stopped()


async def in_executor(executor: Executor, work: Callable[[Callable[[], object]], T]) -> T:
    """Run work in an executor's thread; until it calls its argument, it counts as queued.

    Work that has begun runs to its end, be the caller cancelled.
    """
    loop = asyncio.get_running_loop()
    started = loop.create_future()

    def start(*_: object) -> None:
        if not started.done():
            started.set_result(None)

    call = loop.run_in_executor(executor, work, partial(loop.call_soon_threadsafe, start))
    call.add_done_callback(start)
    try:
        with queued():
            await started
        return await call
    finally:
        call.cancel()


async def in_thread(executor: Executor, function: Callable[[], T]) -> T:
    """Call a function in an executor's thread; the time until it is called counts as queued."""

    def work(started: Callable[[], object]) -> T:
        started()
        return function()

    return await in_executor(executor, work)


class _Clock:
    """A deadline that stands still while at least one call of its code waits."""

    def __init__(self, timeout: asyncio.Timeout, enclosing: _Clock | None) -> None:
        self.enclosing = enclosing
        self.ended = False
        self._timeout = timeout
        self._waiting = 0
        self._left: float | None = None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock; the deadline moves by as long as that lasts."""
        now = asyncio.get_running_loop().time
        self._waiting += 1
        when = self._timeout.when()
        if self._waiting == 1 and when is not None and not self._over:
            self._left = when - now()
            self._timeout.reschedule(None)
        try:
            yield
        finally:
            self._waiting -= 1
            if self._waiting == 0 and self._left is not None and not self._over:
                self._timeout.reschedule(now() + self._left)
                self._left = None

    @property
    def _over(self) -> bool:
        return self.ended or self._timeout.expired()


_current: ContextVar[_Clock | None] = ContextVar("rlkit_clock", default=None)

"""The boundary at which foreign code is called: what it does wrong is an error with its name; its clock is its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Protocol, TypeVar

from rlkit.errors import RolloutError, explain, show
from rlkit.text import part_name

T = TypeVar("T")


class Timed(Protocol):
    """A part with a deadline."""

    @property
    def timeout(self) -> float:
        """Seconds."""


class GuardError(Exception):
    """Foreign code raised, took longer than it may, or returned nonsense.

    Args:
        part: Whose code it is.
        problem: What it did, without its name.
    """

    def __init__(self, part: object, problem: str) -> None:
        super().__init__(f"{part_name(part)}: {problem}")
        self.problem = problem


async def guard(work: Callable[[], Awaitable[T]], part: Timed, expected: type | None = None) -> T:
    """Call foreign code and await it within the part's `timeout`.

    Time in a queue does not count, see `queued`, nor what has a deadline of its own, see `paused`.

    Args:
        work: Makes what is awaited; what it raises counts as the code's.
        part: Whose code it is.
        expected: The type that must come back; None for any.

    Raises:
        GuardError: It raised, took too long, or returned something else.
        RolloutError: Passed on: the run's own.
    """
    try:
        async with deadline(part.timeout):
            with errors_of(part):
                value = await work()
    except TimeoutError as error:
        raise GuardError(part, f"did not finish within {part.timeout:g} s") from error
    if expected is not None and not isinstance(value, expected):
        raise GuardError(part, f"it returned {show(value)}, expected {expected.__name__}")
    return value


@contextmanager
def errors_of(part: object) -> Iterator[None]:
    """Turn what foreign code raises into an error that names the part.

    Raises:
        GuardError: It raised something, be it SystemExit, or a CancelledError without a cancellation.
        RolloutError: Passed on: the run's own.
    """
    try:
        yield
    except RolloutError:
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise GuardError(part, explain(error)) from error
    except (Exception, SystemExit) as error:  # foreign code may raise anything
        raise GuardError(part, explain(error)) from error


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


@contextmanager
def queued() -> Iterator[None]:
    """Stop the clocks of all deadlines around the caller: for time in a queue, in which no work is done."""
    with ExitStack() as stack:
        clock = _current.get()
        while clock is not None:
            stack.enter_context(clock.stopped())
            clock = clock.outer
        yield


@contextmanager
def paused() -> Iterator[None]:
    """Stop the clock of the innermost deadline around the caller: for work that has a deadline of its own."""
    clock = _current.get()
    with nullcontext() if clock is None else clock.stopped():
        yield


class _Clock:
    """A deadline that stands still while at least one call of its code waits."""

    def __init__(self, timeout: asyncio.Timeout, outer: _Clock | None) -> None:
        self.outer = outer
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

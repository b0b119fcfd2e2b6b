"""The boundary at which foreign code is called: what it does wrong is an error with its name; its clock is its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from rlkit.base.deadlines import deadline
from rlkit.base.errors import PartError, RolloutError, explain_foreign, show, with_definition
from rlkit.base.text import part_name

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
        method: The one that did it, which is named if the problem names no line.
    """

    def __init__(self, part: object, problem: str, method: str = "") -> None:
        super().__init__(with_definition(f"{part_name(part)}: {problem}", part, method))
        self.problem = problem


async def guard(work: Callable[[], Awaitable[T]], part: Timed, expected: type | None = None, method: str = "") -> T:
    """Call foreign code and await it within the part's `timeout`.

    Time in a queue does not count, see `queued`, nor what has a deadline of its own, see `paused`.

    Args:
        work: Makes what is awaited; what it raises counts as the code's.
        part: Whose code it is.
        expected: The type that must come back; None for any.
        method: The part's, for messages.

    Raises:
        GuardError: It raised, took too long, or returned something else.
        RolloutError: Passed on: the run's own.
    """
    try:
        async with deadline(part.timeout):
            with errors_of(part, method):
                value = await work()
    except TimeoutError as error:
        raise GuardError(part, f"did not finish within {part.timeout:g} s", method) from error
    if expected is not None and not isinstance(value, expected):
        raise GuardError(part, f"it returned {show(value)}, expected {expected.__name__}", method)
    return value


@contextmanager
def errors_of(part: object, method: str = "") -> Iterator[None]:
    """Turn what foreign code raises into an error that names the part.

    Raises:
        GuardError: It raised something, be it SystemExit, or a CancelledError without a cancellation.
        RolloutError: Passed on: the run's own.
        PartError: Passed on: it names the part already.
    """
    try:
        yield
    except (PartError, RolloutError):
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise GuardError(part, explain_foreign(error), method) from error
    except (Exception, SystemExit) as error:  # foreign code may raise anything
        raise GuardError(part, explain_foreign(error), method) from error

"""Time limits of checks, which call foreign code in the caller's own process and thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlkit.concurrency import limits


@contextmanager
def time_limit(name: str, seconds: float) -> Iterator[None]:
    """Interrupt code that takes longer: in the main thread only, and not inside a function of C.

    Args:
        name: What the message calls it.
        seconds: The limit.

    Raises:
        AssertionError: It took longer, even if it handled the interrupt.
    """
    try:
        with limits.time_limit(seconds):
            yield
    except limits.OverdueError as error:
        raise AssertionError(f"{name} did not finish within {seconds:g} s") from error

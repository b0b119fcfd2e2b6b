"""Time limits of checks, which call foreign code in the caller's own process and thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlkit.base import limits


@contextmanager
def time_limit(name: str, seconds: float) -> Iterator[None]:
    """Interrupt code that takes too long: only in the main thread, and not inside a C function.

    Args:
        name: Name of the code, for the message.
        seconds: The limit.

    Raises:
        AssertionError: The code took longer, even if it handled the interrupt.
    """
    try:
        with limits.time_limit(seconds):
            yield
    except limits.OverdueError as error:
        raise AssertionError(f"{name} did not finish within {seconds:g} s") from error

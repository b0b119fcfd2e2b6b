"""Time limits of checks, which call foreign code in the caller's own process and thread."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class _Overdue(BaseException):
    """Interrupts code that may handle every Exception."""


@contextmanager
def time_limit(name: str, seconds: float) -> Iterator[None]:
    """Interrupt code that takes longer: in the main thread only, and not inside a function of C.

    Args:
        name: What the message calls it.
        seconds: The limit.

    Raises:
        AssertionError: It took longer, even if it handled the interrupt.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    overdue = False

    def interrupt(*_: object) -> None:
        nonlocal overdue
        overdue = True
        raise _Overdue

    handler = signal.signal(signal.SIGALRM, interrupt)
    start = time.monotonic()
    outer_seconds, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _Overdue:
        if not overdue:
            raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if outer_seconds:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, outer_seconds - (time.monotonic() - start)))
    if overdue:
        raise AssertionError(f"{name} did not finish within {seconds:g} s")

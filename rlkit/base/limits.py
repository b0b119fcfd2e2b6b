"""Limits of foreign code in the caller's own process and thread, such as a chat template's: seconds and memory."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LIMITING = threading.RLock()
"""Held while memory is limited, which limits all threads."""


class OverdueError(Exception):
    """Code took longer than its limit."""


class _Interrupt(BaseException):
    """Interrupts code that may handle every Exception."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt code that takes longer: in the main thread only, and not inside a function of C.

    Raises:
        OverdueError: It took longer, even if it handled the interrupt.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    overdue = False

    def interrupt(*_: object) -> None:
        nonlocal overdue
        overdue = True
        raise _Interrupt

    handler = signal.signal(signal.SIGALRM, interrupt)
    start = time.monotonic()
    outer_seconds, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _Interrupt:
        if not overdue:
            raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if outer_seconds:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, outer_seconds - (time.monotonic() - start)))
    if overdue:
        raise OverdueError(f"it did not finish within {seconds:g} s")


@contextmanager
def memory_limit(size: int) -> Iterator[None]:
    """Let the process allocate `size` bytes more at most; what asks for more raises a MemoryError."""
    with _LIMITING:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = pages * resource.getpagesize() + size
        if soft not in (resource.RLIM_INFINITY, -1):
            limit = min(limit, soft)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def limit_mb() -> float:
    """Return the memory that this process may use, in MiB: the machine's, or its container's; 0 if unknown."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(name).read_text(encoding="utf-8")) / 2**20)
        except (OSError, ValueError):
            continue
    return min(limits)

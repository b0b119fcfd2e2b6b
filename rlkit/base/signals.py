"""Signals that end a program, as errors."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def raised() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, while a run is being prepared."""
    main = threading.current_thread() is threading.main_thread()  # no other thread can handle signals
    numbers = [s for s in (signal.SIGTERM, signal.SIGHUP) if main and is_handled(s)]
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler or signal.SIG_DFL)


def is_handled(number: signal.Signals) -> bool:
    """Whether a signal ends a program here; SIGHUP is ignored under nohup."""
    return number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN

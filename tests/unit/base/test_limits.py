"""Limits of foreign code in this process."""

from __future__ import annotations

import resource
import threading

from rlkit.base.limits import memory_limit


def test_threads_that_limit_memory_leave_no_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    entered = threading.Event()

    def limit() -> None:
        with memory_limit(2**30):
            entered.set()

    other = threading.Thread(target=limit)
    try:
        with memory_limit(2**31):
            other.start()
            assert not entered.wait(0.05)  # it would take this thread's limit for that of the process
        other.join()
        assert entered.is_set()
        assert resource.getrlimit(resource.RLIMIT_AS) == before
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

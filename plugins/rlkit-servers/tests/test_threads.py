"""Functions that block, in a thread of their own."""

from __future__ import annotations

import asyncio
from threading import Event

import pytest
import torch
from rlkit_servers.threads import in_daemon, in_daemon_thread


def test_what_a_thread_returns_or_raises_is_its_callers() -> None:
    device = torch.device("cpu")
    assert asyncio.run(in_daemon_thread(device, lambda: 6 * 7)) == 42
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_daemon_thread(device, lambda: 1 / 0))


def test_an_end_of_iteration_is_an_error_of_the_function() -> None:
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        asyncio.run(in_daemon(lambda: next(iter(()))))


def test_a_cancelled_caller_leaves_its_thread_alone(capfd: pytest.CaptureFixture[str]) -> None:
    started, go_on, ended = Event(), Event(), Event()

    def work() -> None:
        started.set()
        go_on.wait()
        ended.set()

    async def cancel() -> None:
        task = asyncio.create_task(in_daemon(work))
        await asyncio.to_thread(started.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        await asyncio.to_thread(ended.wait)

    asyncio.run(cancel())
    assert capfd.readouterr().err == ""

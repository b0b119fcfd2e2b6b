"""Threads for blocking calls, and tasks that outlive a cancelled caller."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import TypeVar

import torch

from rlkit.distributed.offload import use_device

T = TypeVar("T")

_detached: set[asyncio.Task[object]] = set()


async def run_detached(work: Coroutine[object, None, T]) -> T:
    """Wait for work that continues if the caller is cancelled; its later errors are then not reported."""
    task = asyncio.create_task(work)
    _detached.add(task)
    task.add_done_callback(_detached.discard)
    task.add_done_callback(lambda ended: None if ended.cancelled() else ended.exception())
    return await asyncio.shield(task)


async def in_daemon(function: Callable[[], T]) -> T:
    """Run a function in a thread of its own, which never keeps the process alive; it may hang, as in no pool."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # so that a cancelled caller leaves it to the thread

    def work() -> None:
        try:
            future.set_result(function())
        except StopIteration as error:  # which asyncio's futures refuse
            future.set_exception(RuntimeError(f"raised StopIteration: {error}"))
        except BaseException as error:  # the caller's to judge
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return await asyncio.wrap_future(future)


async def in_daemon_thread(device: torch.device, function: Callable[[], T]) -> T:
    """Run a function that blocks on a device as `in_daemon` does."""

    def work() -> T:
        use_device(device)
        return function()

    return await in_daemon(work)


async def off_loop(device: torch.device, function: Callable[[], T]) -> T:
    """Run a function that blocks on a device in a thread; a cancelled caller resumes only after it.

    This keeps collective calls of all ranks in order.
    """
    task = asyncio.ensure_future(in_daemon_thread(device, function))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise

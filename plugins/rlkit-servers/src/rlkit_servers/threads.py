"""Threads for blocking calls, and tasks that outlive a cancelled caller."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
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


async def in_daemon_thread(device: torch.device, function: Callable[[], T]) -> T:
    """Run a function that blocks on a device in a daemon thread, which never keeps the process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def set_result(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def work() -> None:
        result: T | None = None
        failure: Exception | None = None
        try:
            use_device(device)
            result = function()
        except Exception as error:
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(set_result, result, failure)

    threading.Thread(target=work, daemon=True).start()
    return await future


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

"""Work beside a caller: threads for what blocks, and tasks that go on if the caller is cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import torch

from rlkit.distributed.offload import use_device

T = TypeVar("T")

_detached: set[asyncio.Task[Any]] = set()


async def detached(work: Coroutine[object, None, T]) -> T:
    """Wait for work that goes on if the caller is cancelled; what it raises then is not reported."""
    task = asyncio.create_task(work)
    _detached.add(task)
    task.add_done_callback(_detached.discard)
    task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return await asyncio.shield(task)


async def in_daemon_thread(device: torch.device, function: Callable[[], T]) -> T:
    """Run what blocks on a device in a thread that, if it never returns, does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def set_result(result: T | None, error: BaseException | None) -> None:
        if not done.done():
            done.set_result(result) if error is None else done.set_exception(error)  # type: ignore[arg-type]

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
    return await done


async def beside_loop(device: torch.device, function: Callable[[], T]) -> T:
    """Run what blocks on a device in a thread; a cancelled caller goes on only after it.

    So what ranks do together, one call after another, stays in order.
    """
    running = asyncio.ensure_future(in_daemon_thread(device, function))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait((running,))
        raise

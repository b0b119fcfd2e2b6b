"""Calls of blocking code that may never return."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def in_daemon(function: Callable[[], T]) -> T:
    """Call a function in a thread of its own.

    A pool would run out of threads as calls hang, and a thread that is no daemon would keep the process alive.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if outcome.done():  # cancelled by its deadline
            return
        if error is None:
            outcome.set_result(result)  # type: ignore[arg-type]
        else:
            outcome.set_exception(error)

    def work() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = function()
        except StopIteration as stop:  # a future refuses it
            error = RuntimeError(f"raised StopIteration: {stop}")
        except BaseException as raised:  # the caller's to judge
            error = raised
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="gym", daemon=True).start()
    return await outcome

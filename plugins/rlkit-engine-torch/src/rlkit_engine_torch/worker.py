"""The thread that runs the model, so that a decode step never blocks the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from rlkit.distributed.offload import use_device

T = TypeVar("T")


class Worker:
    """One thread that runs decode steps, and between them other calls.

    Args:
        device: The model's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._executor = ThreadPoolExecutor(1, "rlkit-decode", use_device, (device,))
        self._pending: deque[None] = deque()
        """One entry for each call that waits until the step in progress is over."""

    @property
    def has_calls(self) -> bool:
        """Whether calls wait until the step in progress is over."""
        return bool(self._pending)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run a call before the next decode step."""

        def run() -> T:
            self._pending.pop()
            return _without_stop(call)

        self._pending.append(None)
        return self._executor.submit(run)

    async def run_steps(self, steps: Callable[[], T]) -> T:
        """Run decode steps; a cancelled caller resumes only after the step in progress."""
        try:
            return await asyncio.shield(
                asyncio.get_running_loop().run_in_executor(self._executor, _without_stop, steps)
            )
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.wrap_future(self.submit(_nothing_to_do)))
            raise

    def close(self) -> None:
        """Finish the step in progress; cancel what waits."""
        self._executor.shutdown(cancel_futures=True)


def _without_stop(call: Callable[[], T]) -> T:
    """Call a function; a StopIteration becomes another error, since asyncio never passes it on to who waits."""
    try:
        return call()
    except StopIteration as error:
        raise RuntimeError("StopIteration: the model's code called next() on an iterator that had ended") from error


def _nothing_to_do() -> None: ...

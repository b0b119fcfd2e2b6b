"""Structured concurrency: no task outlives an error of those that it was started with."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


async def run_concurrently(*work: Coroutine[object, None, T]) -> list[T]:
    """Gather the results of coroutines in order; after an error the others are cancelled and have ended.

    Raises:
        BaseException: The first error itself, without a group around it.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
    else:
        return [task.result() for task in tasks]
    raise first


async def run_first(count: int, *work: Coroutine[object, None, T]) -> list[T | None]:
    """Gather the results of coroutines in order; None for those that are cancelled once `count` others have ended.

    Raises:
        BaseException: The first error itself, without a group around it; all have ended then.
    """
    ended: set[int] = set()

    async def watch(index: int) -> T:
        result = await work[index]
        ended.add(index)
        if len(ended) == count:
            for task_index, task in enumerate(tasks):
                if task_index not in ended:
                    task.cancel()
        return result

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(watch(index)) for index in range(len(work))]
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
    else:
        return [None if task.cancelled() else task.result() for task in tasks]
    raise first


async def cancel(*tasks: asyncio.Future[T]) -> None:
    """Cancel tasks and wait until they have ended; what they raise is not reported."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Background:
    """Tasks that go on when the function that started them returns, until `wait`."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def running(self) -> int:
        """How many have not ended."""
        return sum(not task.done() for task in self._tasks)

    def start(self, work: Coroutine[object, None, None]) -> None:
        """Start work on the event loop from which this is called."""
        self._tasks.append(asyncio.create_task(work))

    def adopt(self, task: asyncio.Task[None]) -> None:
        """Take a task that was started before."""
        self._tasks.append(task)

    async def wait(self) -> None:
        """Wait for all tasks and forget them; after an error the others are cancelled and have ended.

        Raises:
            BaseException: The first error of a task.
        """
        tasks, self._tasks = self._tasks, []
        try:
            await asyncio.gather(*tasks)
        finally:
            await cancel(*tasks)

    async def __aenter__(self) -> Background:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        """After an error cancel all tasks and wait until they have ended."""
        if kind is not None:
            tasks, self._tasks = self._tasks, []
            await cancel(*tasks)

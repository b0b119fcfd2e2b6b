"""The event loop on which rollouts and rewards run."""

from __future__ import annotations

import asyncio
import selectors
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as wait_for
from contextlib import closing
from functools import partial
from types import FrameType
from typing import TypeVar

from rlkit.base.errors import is_foreign, locate_frame
from rlkit.base.text import redact, safe, source_of
from rlkit.interfaces.runtime import RunPart
from rlkit.registry import close_parts

T = TypeVar("T")

TICK_SECONDS, STALL_SECONDS = 0.25, 1.0
"""How often the loop wakes up while deadlines run, and how much time counts between two such times at most."""

CLOSE_SECONDS = 60.0
"""Tasks that were cancelled may take this long to end; their parts have deadlines of their own."""


LOOK_SECONDS = 0.25
"""How often the loop's thread is looked at."""
BLOCK_LOOKS = 4
"""Looks in a row at which a plugin's code runs and the loop does nothing else, after which a warning names it."""


class _Selector(selectors.DefaultSelector):
    """Counts the time in which the loop runs: no more than `STALL_SECONDS` between two of its iterations."""

    def __init__(self) -> None:
        super().__init__()
        self._counted = self._last = time.monotonic()
        self.iterations = 0

    def time(self) -> float:
        """Return the seconds until now, those of stalls left out."""
        return self._counted + min(time.monotonic() - self._last, STALL_SECONDS)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for input and output until the next tick at most, if any deadline runs."""
        self._tick()
        self.iterations += 1
        events = super().select(None if timeout is None else min(timeout, TICK_SECONDS))
        self._tick()
        return events

    def _tick(self) -> None:
        self._counted, self._last = self.time(), time.monotonic()


class _Loop(asyncio.SelectorEventLoop):
    """Its clock stands still while the loop does: the process is stopped, or a part blocks the thread or the GIL.

    Otherwise all deadlines would have passed after it, though nothing could be done in the meantime.
    """

    def __init__(self) -> None:
        self.selector = _Selector()
        self.time = self.selector.time  # type: ignore[method-assign]
        super().__init__(self.selector)


def warn_on_stderr(text: str) -> None:
    """Show a warning where no reporter of a run does."""
    print(safe(redact(text)), file=sys.stderr)


class BlockWatch:
    """Looks at an event loop from a thread of its own, and warns once of each function that blocks it.

    Args:
        iterations: Returns how often the loop has looked for events.
        warn: Shows a warning; called from the thread.
    """

    def __init__(self, iterations: Callable[[], int], warn: Callable[[str], None]) -> None:
        self._iterations, self._warn = iterations, warn
        self._ended = threading.Event()
        self._loop_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="rlkit-block-watch")
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        iteration, looks, warned = -1, 0, set()
        while not self._ended.wait(LOOK_SECONDS):
            frame = _plugin_frame(sys._current_frames().get(self._loop_thread))
            before, iteration = iteration, self._iterations()
            looks = looks + 1 if frame is not None and iteration == before else 0
            if frame is not None and looks == BLOCK_LOOKS and frame.f_code not in warned:
                warned.add(frame.f_code)
                self._warn(
                    f"warning: {frame.f_code.co_qualname}{source_of(frame.f_globals.get('__name__', ''))} has blocked "
                    f"all rollouts for {BLOCK_LOOKS * LOOK_SECONDS:g} s{locate_frame(frame)}; await what takes time, "
                    "such as asyncio.sleep, or call it by `await asyncio.to_thread(...)`"
                )


def _plugin_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the plugin, or of the user's file, that the loop has called; None without one,
    and while parts are closed: no rollout is left that would wait."""
    frames: list[FrameType] = []
    while frame is not None:
        if frame.f_code is close_on_loop.__code__:
            return None
        frames.append(frame)
        frame = frame.f_back
    for called in filter(is_foreign, reversed(frames)):
        is_installed = "site-packages" in called.f_code.co_filename  # of others, only plugins are named
        if not is_installed or source_of(_package(called)).startswith(" of plugin "):
            return next(f for f in frames if _package(f) == _package(called))
    return None


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


class EventLoop:
    """Runs coroutines in a thread of its own, so that their clocks are right whatever the caller's thread does.

    A deadline counts no time in which the whole process was stopped, or the loop blocked.

    Args:
        prepare: Called once in the thread.
        warn: Shows a warning of code that blocks the loop; called from any thread.
    """

    def __init__(self, prepare: Callable[[], None], warn: Callable[[str], None] = warn_on_stderr) -> None:
        self._loop = _Loop()
        self._prepare, self._warn = prepare, warn
        self._tasks: dict[object, asyncio.Task[object]] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._serve, daemon=True, name="rlkit-rollouts")
        self._thread.start()

    def submit(self, work: Coroutine[object, None, T]) -> Future[T]:
        """Start work from any thread; the future is done once the work has ended, which `cancel` waits for too."""
        return self._submit(work, Future())

    def run(self, work: Coroutine[object, None, T]) -> T:
        """Run the work and return its result; tasks that it leaves behind go on.

        Whatever interrupts the caller, such as a Ctrl-C, cancels the work, and is raised once that has ended.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("the event loop cannot wait for work of its own; await it")
        future: Future[T] = Future()
        try:
            return self._submit(work, future).result()
        except BaseException:
            if not future.done():
                self.cancel(future)
            raise

    def cancel(self, future: Future[T]) -> None:
        """Cancel work that was submitted, and wait until it has ended."""
        self._loop.call_soon_threadsafe(self._cancel, future)
        wait_for([future])

    def cancel_all(self) -> None:
        """Cancel all that is running, without a report of what it raises, and wait until it has ended."""
        self._loop.set_exception_handler(lambda *_: None)
        self.run(self._cancel_all())

    def close(self) -> None:
        """Cancel all that is still running and end the thread."""
        if self._closing:
            return
        self.cancel_all()
        self._closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._prepare()
        with closing(BlockWatch(lambda: self._loop.selector.iterations, self._warn)):
            while not self._closing:
                try:
                    self._loop.run_forever()
                except (SystemExit, KeyboardInterrupt):  # of a part: it is its task's exception as well
                    continue

    def _submit(self, work: Coroutine[object, None, T], future: Future[T]) -> Future[T]:
        self._loop.call_soon_threadsafe(self._start, work, future)
        return future

    def _start(self, work: Coroutine[object, None, T], future: Future[T]) -> None:
        self._tasks[future] = task = self._loop.create_task(work)
        task.add_done_callback(partial(self._finish, future))

    def _finish(self, future: Future[T], task: asyncio.Task[T]) -> None:
        del self._tasks[future]
        error = CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())

    def _cancel(self, future: Future[T]) -> None:
        if future in self._tasks:
            self._tasks[future].cancel()
        elif not future.done():  # the caller was interrupted before it had submitted the work
            future.set_exception(CancelledError())

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
        await self._loop.shutdown_asyncgens()


async def close_on_loop(used: Sequence[RunPart]) -> None:
    """Close parts on the loop that their connections belong to, and wait for the tasks that they start."""
    before = asyncio.all_tasks()
    close_parts(used)
    started = asyncio.all_tasks() - before
    if started:
        await asyncio.wait(started, timeout=CLOSE_SECONDS)

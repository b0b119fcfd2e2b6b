"""Worker processes for foreign code: what raises, hangs or dies in one costs its own call and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import spawn
from typing import TypeVar, cast

import cloudpickle

from rlkit.base.deadlines import in_executor, paused
from rlkit.base.errors import explain, shorten
from rlkit.base.tasks import run_concurrently
from rlkit.rollout import worker
from rlkit.rollout.loop import STALL_SECONDS
from rlkit.rollout.worker import ANSWER_BYTES, HEADER, MARK, kill_descendants

R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

BATCH_SECONDS = 0.02
"""So much work is sent to a worker at once, by what the last calls took."""
READ_BYTES = 2**16
"""How much of answers is read at once."""
START_SECONDS = 120.0
"""A worker may take this long to start and to import what a call needs."""
GRACE_SECONDS = 2.0
"""A watcher may take so long to end what it watches; after that it is done from here."""
LOOK_SECONDS = 0.2
"""How often a call that is waited for looks whether the run is over."""


class WorkerError(Exception):
    """A call failed in its worker: it raised, ran past its deadline, or took the process down."""


class Workers:
    """Calls functions in other processes, each of which is killed and replaced when a call outlasts its deadline.

    A process that a call starts and leaves running, a daemon too, is killed after the calls that were sent together.
    Only data comes back, as JSON holds it. What a call prints is shown on standard error, as far as it is short.

    Args:
        count: How many processes; they start with the first calls.
    """

    def __init__(self, count: int) -> None:
        self._executor = ThreadPoolExecutor(count, thread_name_prefix="rlkit-worker")
        self._idle: list[_Process] = []
        self._closing = threading.Event()
        self._seconds: dict[type, float] = {}
        """What a call took last, by the type of what the calls share."""

    async def call(self, function: Callable[[T], R], argument: T, timeout: float) -> R:
        """Return `function(argument)`, both pickled; the deadline, in seconds, counts from when the work starts.

        What is defined in the main module or a notebook, or inside of a function, is sent by value: the worker never
        runs the main module.

        Raises:
            WorkerError: It raised, hung, died, cannot be pickled, or returned what is no data.
        """
        [outcome] = await self._send(_unshared, function, [argument], timeout)
        if isinstance(outcome, WorkerError):
            raise outcome
        return outcome

    async def call_each(
        self, function: Callable[[S, T], R], shared: S, arguments: Sequence[T], timeout: float
    ) -> list[R | WorkerError]:
        """Return `function(shared, argument)` of each argument, or the WorkerError of that call.

        Arguments are sent together, as many as take some milliseconds; each has the whole deadline. Where one breaks
        its worker, it and those behind it are called once more, each alone, so that none pays for another.
        """
        size = max(1, int(BATCH_SECONDS / self._seconds.get(type(shared), BATCH_SECONDS)))
        batches = [arguments[i : i + size] for i in range(0, len(arguments), size)]
        outcomes = await run_concurrently(*(self._call_batch(function, shared, b, timeout) for b in batches))
        return [outcome for batch in outcomes for outcome in batch]

    async def _call_batch(
        self, function: Callable[[S, T], R], shared: S, batch: Sequence[T], timeout: float
    ) -> list[R | WorkerError]:
        try:
            outcomes = await self._send(function, shared, batch, timeout)
        except WorkerError as error:
            outcomes = [error] if len(batch) == 1 else []
        retried = (self._call_batch(function, shared, [argument], timeout) for argument in batch[len(outcomes) :])
        return outcomes + [outcome for [outcome] in await run_concurrently(*retried)]

    async def _send(
        self, function: Callable[[S, T], R], shared: S, arguments: Sequence[T], timeout: float
    ) -> list[R | WorkerError]:
        """Return the outcomes of the arguments, of the first ones where one broke the worker; of a single one always.

        Raises:
            WorkerError: There is no outcome.
        """
        try:
            pickled = [cloudpickle.dumps(argument) for argument in arguments]  # what a call changes reaches no other
            payload = cloudpickle.dumps((function, shared, pickled))
        except Exception as error:  # pickling runs foreign code
            raise WorkerError(f"cannot be sent to a worker: {explain(error)}") from error
        with paused():  # the work has a deadline of its own
            work = partial(self._call, payload, len(arguments), timeout)
            outcomes, seconds = await in_executor(self._executor, work)
        self._seconds[type(shared)] = max(seconds / len(arguments), 1e-6)
        return cast("list[R | WorkerError]", outcomes)

    def _call(
        self, payload: bytes, count: int, timeout: float, started: Callable[[], object]
    ) -> tuple[list[object], float]:
        """Call in an idle process, and once more in a new one if that was found broken before the work started.

        Returns:
            The outcomes up to one that broke the process, and the seconds that they took.
        """
        while True:
            if self._closing.is_set():
                raise WorkerError("was not called: the run is over")
            try:
                process = self._idle.pop()
            except IndexError:  # there are as many threads as there may be processes
                process = _Process(self._closing)
            outcomes: list[object] = []
            try:
                for kind, value in process.call(payload, count, timeout, started):
                    outcomes.append(value if kind == "value" else WorkerError(value))
            except BaseException as error:
                process.close()
                if not isinstance(error, WorkerError) or not (outcomes or (process.answered and not process.begun)):
                    raise
                if not outcomes:
                    continue  # an earlier call broke it
            else:
                self._idle.append(process)
            if not process.begun:  # one of the arguments cannot be read there
                return outcomes[: count == 1], BATCH_SECONDS
            return outcomes, time.monotonic() - process.begun

    def close(self) -> None:
        """Kill all workers; calls in progress fail."""
        self._closing.set()
        self._executor.shutdown(wait=True, cancel_futures=True)
        self.close_idle()

    def close_idle(self) -> None:
        """Kill the workers that have nothing to do; the next calls start new ones."""
        while self._idle:
            self._idle.pop().close()


class _Process:
    """A worker, its watcher, and whatever they start.

    Attributes:
        answered: Whether it has answered a call.
        begun: When the function of the last call was called, 0 if it was not.
    """

    def __init__(self, closing: threading.Event) -> None:
        self.answered, self.begun = False, 0.0
        self._unread = bytearray()
        self._closing = closing
        self._mark = os.urandom(8).hex()
        screen = _screen()
        try:
            self._printed = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
            self._popen = subprocess.Popen(
                (sys.executable, "-P", worker.__file__, str(screen)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._printed,
                bufsize=0,
                env={**os.environ, MARK: self._mark},
                pass_fds=(screen,),
                start_new_session=True,
            )
        except OSError as error:
            raise WorkerError(f"has no worker: its process cannot be started: {error}") from error
        finally:
            os.close(screen)
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._requests, self._answers = self._popen.stdin.fileno(), self._popen.stdout.fileno()
        for end in (self._requests, self._answers):
            os.set_blocking(end, False)

    def call(
        self, payload: bytes, count: int, timeout: float, started: Callable[[], object]
    ) -> Iterator[tuple[str, object]]:
        """Yield for each argument `value` and what the function returned, or `error` and what it raised.

        `started` marks the start of the work. An `error` before that is the only one.
        """
        self.begun = 0.0
        self._limit(START_SECONDS, "start")
        if self.answered and (self._unread or select.select((self._answers,), (), (), 0)[0]):
            raise self._failed("ended, or wrote something, between two calls")
        names = ("sys_path", "sys_argv", "orig_dir", "dir")  # no main module, of which nothing is imported
        preparation = spawn.get_preparation_data("rlkit-worker")
        own = {name: preparation[name] for name in names if name in preparation}
        call, request = os.urandom(16), pickle.dumps((own, payload))
        try:
            self._write(HEADER.pack(call, len(request)) + request)
            kind, value = self._read_answer(call)
            if kind == "error":
                self.answered = True
                yield kind, value
                return
            if kind != "started":
                raise self._garbled()
            self.begun = time.monotonic()
            started()
            for _ in range(count):
                self._limit(timeout, "finish")
                kind, value = self._read_answer(call)
                if kind not in ("value", "error"):
                    raise self._garbled()
                self.answered = True
                yield kind, value
        except (EOFError, OSError) as error:
            raise self._gone() from error

    def close(self) -> str:
        """Kill the process and whatever descends from it; return what it printed last."""
        if self._printed.closed:
            return ""
        for end in (self._popen.stdin, self._popen.stdout):
            if end is not None:
                end.close()  # with which the watcher kills its descendants and ends
        try:
            self._popen.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            kill_descendants(self._popen.pid, self._mark)
            self._popen.kill()
            self._popen.wait()
        kill_descendants(None, self._mark)  # if the watcher was killed
        with self._printed:
            self._printed.seek(0)
            return self._printed.read().decode(errors="replace").strip()

    def _limit(self, seconds: float, what: str) -> None:
        self._deadline = time.monotonic() + seconds
        self._message = f"did not {what} within {seconds:g} s and was killed"

    def _read_answer(self, call: bytes) -> tuple[str, object]:
        answered_call, length = HEADER.unpack(self._read(HEADER.size))
        if answered_call != call or length > ANSWER_BYTES:
            raise self._garbled()
        try:
            kind, value = json.loads(self._read(length))
        except (ValueError, TypeError, RecursionError):
            raise self._garbled() from None
        return str(kind), shorten(str(value)) if kind == "error" else value

    def _read(self, count: int) -> bytes:
        while len(self._unread) < count:
            try:
                chunk = os.read(self._answers, max(READ_BYTES, count - len(self._unread)))
            except BlockingIOError:
                self._wait(self._answers, select.POLLIN)
                continue
            if not chunk:
                raise EOFError
            self._unread += chunk
        data = bytes(self._unread[:count])
        del self._unread[:count]
        return data

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._requests, view) :]
            except BlockingIOError:
                self._wait(self._requests, select.POLLOUT)

    def _wait(self, end: int, event: int) -> None:
        """Wait for a descriptor until the deadline, or until the run is over."""
        ready = select.poll()
        ready.register(end, event)
        start = time.monotonic()
        while not ready.poll(1000 * max(0.0, min(LOOK_SECONDS, self._deadline - start))):
            if self._closing.is_set():
                raise WorkerError("was not finished: the run is over")
            start, before = time.monotonic(), start
            self._deadline += max(0.0, start - before - STALL_SECONDS)  # while it was stopped
            if start >= self._deadline:
                raise self._failed(self._message)

    def _garbled(self) -> WorkerError:
        return self._failed("wrote into the pipe of its worker process, which was killed")

    def _failed(self, what: str) -> WorkerError:
        """Kill the process; return the error, with the last that was printed where there is anything."""
        printed = self.close()
        return WorkerError(f"{what}; it printed last: {shorten(printed)}" if printed else what)

    def _gone(self) -> WorkerError:
        """Return the error of a process whose pipe ended, with its exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(GRACE_SECONDS)  # the watcher ends with the worker
        code = self._popen.returncode
        if code is None:
            return self._failed("closed the pipe of its worker process, which was killed")
        return self._failed(f"took its worker process down (exit code {code if code <= 128 else 128 - code})")


def _unshared(function: Callable[[T], R], argument: T) -> R:
    return function(argument)


def _screen() -> int:
    """Return a descriptor of its own for standard error."""
    try:
        return os.dup(2)
    except OSError:  # it is closed
        return os.open(os.devnull, os.O_WRONLY)

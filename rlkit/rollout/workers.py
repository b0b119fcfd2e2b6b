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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import spawn
from typing import Any, TypeVar

import cloudpickle

from rlkit.concurrency.deadlines import in_executor, paused
from rlkit.errors import explain, shorten
from rlkit.rollout import worker
from rlkit.rollout.loop import STALL_SECONDS
from rlkit.rollout.worker import ANSWER_BYTES, HEADER, MARK, kill_descendants

T = TypeVar("T")

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

    What a process started, a daemon too, ends with it. Only data comes back, as JSON holds it. What a call prints is
    shown on standard error, as far as it is short.

    Args:
        count: How many processes; they start with the first calls.
    """

    def __init__(self, count: int) -> None:
        self._executor = ThreadPoolExecutor(count, thread_name_prefix="rlkit-worker")
        self._idle: list[_Process] = []
        self._closing = threading.Event()

    async def call(self, function: Callable[[T], object], argument: T, timeout: float) -> Any:
        """Return `function(argument)`, both pickled; the deadline, in seconds, counts from when the work starts.

        What is defined in the main module or a notebook, or inside of a function, is sent by value: the worker never
        runs the main module.

        Raises:
            WorkerError: It raised, hung, died, cannot be pickled, or returned what is no data.
        """
        try:
            payload = cloudpickle.dumps((function, argument))
        except Exception as error:  # pickling runs foreign code
            raise WorkerError(f"cannot be sent to a worker: {explain(error)}") from error
        with paused():  # the work has a deadline of its own
            return await in_executor(self._executor, partial(self._call, payload, timeout))

    def _call(self, payload: bytes, timeout: float, started: Callable[[], object]) -> Any:
        """Call in an idle process, and once more in a new one if that was found broken before the work started."""
        while True:
            if self._closing.is_set():
                raise WorkerError("was not called: the run is over")
            try:
                process = self._idle.pop()
            except IndexError:  # there are as many threads as there may be processes
                process = _Process(self._closing)
            try:
                kind, value = process.call(payload, timeout, started)
            except BaseException as error:
                process.close()
                if process.answered and not process.begun and isinstance(error, WorkerError):
                    continue  # an earlier call broke it
                raise
            self._idle.append(process)
            if kind == "error":
                raise WorkerError(value)
            return value

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
        begun: Whether the function of the last call was called.
    """

    def __init__(self, closing: threading.Event) -> None:
        self.answered = self.begun = False
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

    def call(self, payload: bytes, timeout: float, started: Callable[[], object]) -> tuple[str, Any]:
        """Return `value` and what the function returned, or `error` and what it raised; `started` marks its start."""
        self.begun = False
        self._limit(START_SECONDS, "start")
        if self.answered and select.select((self._answers,), (), (), 0)[0]:
            raise self._failed("ended, or wrote something, between two calls")
        call, request = os.urandom(16), pickle.dumps((_preparation(), payload))
        try:
            self._write(HEADER.pack(call, len(request)) + request)
            kind, value = self._read_answer(call)
            if kind == "started":
                self.begun = True
                started()
                self._limit(timeout, "finish")
                kind, value = self._read_answer(call)
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if kind not in ("value", "error"):
            raise self._garbled()
        self.answered = True
        return kind, value

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

    def _read_answer(self, call: bytes) -> tuple[str, Any]:
        found, length = HEADER.unpack(self._read(HEADER.size))
        if found != call or length > ANSWER_BYTES:
            raise self._garbled()
        try:
            kind, value = json.loads(self._read(length))
        except (ValueError, TypeError, RecursionError):
            raise self._garbled() from None
        return str(kind), shorten(str(value)) if kind == "error" else value

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._wait(self._answers, select.POLLIN)
            if not (chunk := os.read(self._answers, count - len(data))):
                raise EOFError
            data += chunk
        return bytes(data)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            self._wait(self._requests, select.POLLOUT)
            view = view[os.write(self._requests, view) :]

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


def _screen() -> int:
    """Return a descriptor of its own for standard error."""
    try:
        return os.dup(2)
    except OSError:  # it is closed
        return os.open(os.devnull, os.O_WRONLY)


def _preparation() -> dict[str, Any]:
    """Return what a worker needs to import what the payload names: no main module, of which nothing is imported."""
    wanted = ("sys_path", "sys_argv", "orig_dir", "dir")
    known = spawn.get_preparation_data("rlkit-worker")
    return {name: known[name] for name in wanted if name in known}

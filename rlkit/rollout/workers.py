"""Worker processes for foreign code: what raises, hangs or dies in one costs its own call and nothing else."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

START_SECONDS = 120.0
"""A worker may take this long to start and to import what a call needs."""


class WorkerError(Exception):
    """A call failed in its worker: it raised, ran past its deadline, or took the process down."""


class Workers:
    """Calls functions in other processes, each of which is killed and replaced when a call outlasts its deadline.

    Args:
        count: How many processes; they start with the first call.
    """

    def __init__(self, count: int) -> None:
        self._executor = ThreadPoolExecutor(count, thread_name_prefix="rlkit-worker")
        self._workers = [_Worker() for _ in range(count)]
        self._idle = list(self._workers)

    async def call(self, function: Callable[[Any], Any], argument: Any, timeout: float) -> Any:
        """Give `function(argument)`, both pickled; the deadline, in seconds, counts from when the work starts.

        Raises:
            WorkerError: It raised, hung, died, or cannot be pickled.
        """
        try:
            payload = pickle.dumps((function, argument))
        except Exception as error:  # pickling runs foreign code
            raise WorkerError(f"cannot be sent to a worker: {error}") from error
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._call, payload, timeout)

    def _call(self, payload: bytes, timeout: float) -> Any:
        worker = self._idle.pop()  # there are as many threads as workers
        try:
            return worker.call(payload, timeout)
        finally:
            self._idle.append(worker)

    def close(self) -> None:
        """Kill all workers; calls in progress fail."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.closed = True
            worker.interrupt()
        self._executor.shutdown(wait=True)
        for worker in self._workers:
            worker.kill()


class _Worker:
    def __init__(self) -> None:
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self.closed = False

    def call(self, payload: bytes, timeout: float) -> Any:
        if self.closed:
            raise WorkerError("was not called: the run is over")
        if self._process is None or not self._process.is_alive():
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send_bytes(payload)
            for limit, what in ((START_SECONDS, "start"), (timeout, "finish")):
                if not self._pipe.poll(limit):
                    self.kill()
                    raise WorkerError(f"did not {what} within {limit:g} s and was killed")
                kind, value = self._pipe.recv()
                if kind != "started":
                    break
        except (EOFError, OSError) as error:
            code = self._exit_code()
            self.kill()
            raise WorkerError(f"took its worker process down (exit code {code})") from error
        if kind == "error":
            raise WorkerError(value)
        return value

    def interrupt(self) -> None:
        """Kill the process from another thread: the one that waits for it hears the pipe end."""
        if (process := self._process) is not None:
            process.kill()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None

    def _start(self) -> None:
        self.kill()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True, name="rlkit-worker")
        self._process.start()
        theirs.close()

    def _exit_code(self) -> int | None:
        assert self._process is not None
        self._process.join(1.0)
        return self._process.exitcode


def _serve(pipe: Connection) -> None:
    """Answer calls until the trainer is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    while True:
        try:
            payload = pipe.recv_bytes()
        except EOFError:
            return
        try:
            function, argument = pickle.loads(payload)
            pipe.send(("started", None))
            answer = ("value", function(argument))
            pickle.dumps(answer)
        except BaseException as error:  # a reward may even raise SystemExit
            answer = ("error", f"{type(error).__name__}: {error}")
        pipe.send(answer)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)

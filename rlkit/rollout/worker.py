"""The process behind `Workers`, started as a script: it calls functions for the trainer until the trainer is done.

    watcher      holds no call: drains what the worker prints, and kills whatever descends from it at the end
      worker     reads requests, calls functions, writes answers, kills processes that the functions leave running

A frame is the call's id, the length of its body, and the body. Requests are pickled, the trainer being trusted; answers
are JSON, `["started", null]` and then `["value", x]` or `["error", text]` for each argument, since the worker is not.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import select
import signal
import struct
import sys
import types
from collections.abc import Callable
from functools import cache, partial
from os import WNOHANG, getpid, kill, listdir, read, waitpid, write
from pickle import loads
from time import monotonic, sleep
from typing import TextIO

HEADER = struct.Struct(">16sQ")
ANSWER_BYTES = 16 * 2**20
"""The longest answer."""
SHOWN_BYTES = 64 * 2**10
"""How much of what a worker prints is shown; all of it is read, or the worker would stand still."""
TAIL_BYTES = 1000
"""How much of what it printed last is kept for error messages."""
CONTROL = bytes(code for code in range(32) if code not in b"\t\n")
"""What is printed may hold a policy's text, and must not steer a terminal."""
KILL_SECONDS = 5.0
"""After so long, processes that no signal ends are left alone."""
MARK = "RLKIT_WORKER"
"""The environment variable that identifies descendants whose watcher was killed."""

PDEATHSIG, SUBREAPER = 1, 36

encode = json.JSONEncoder().encode
"""Bound here, as are the functions that are imported by name: what a call patches must not reach the next answer."""

prepared: dict[str, object] = {}
"""What `prepare` has done in this process."""
outputs: list[TextIO] = []
"""The worker's own standard output and error."""


def prctl(option: int, value: int) -> None:
    """Set a property of this process, where there is such a call."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def descendants(root: int | None, mark: str | None = None) -> set[int]:
    """Return the living processes below `root`, and those that have the mark in their environment."""
    parents: dict[int, int] = {}
    pids = set() if root is None else {root}
    for name in filter(str.isdigit, listdir("/proc") if sys.platform == "linux" else ()):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state in (b"Z", b"X"):
                continue
            parents[int(name)] = int(parent)
            if mark is not None:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if f"{MARK}={mark}".encode() in file.read().split(b"\0"):
                        pids.add(int(name))
        except OSError:  # it has ended meanwhile, or is another user's
            continue
    while below := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= below
    return pids - {root}


def kill_descendants(root: int | None, mark: str | None = None) -> None:
    """Kill them until none is left: they may fork meanwhile."""
    deadline = monotonic() + KILL_SECONDS
    while (living := descendants(root, mark)) and monotonic() < deadline:
        for pid in living:
            try:
                kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):  # gone, or became another user's
                continue
        sleep(0.002)


class WorkerOutput:
    """What a worker prints: its beginning is shown, its end is kept."""

    def __init__(self, source: int, screen: int) -> None:
        self.source = source
        self.screen = screen
        self.tail = b""
        self._shown = 0

    def read(self) -> bool:
        """Read some of it; return whether there was any."""
        try:
            chunk = read(self.source, 2**16)
        except BlockingIOError:
            return False
        self.tail = (self.tail + chunk)[-TAIL_BYTES:]
        if chunk and self._shown < SHOWN_BYTES:
            self._show(chunk[: SHOWN_BYTES - self._shown])
            if self._shown >= SHOWN_BYTES:
                self._show(b"\n[this worker has printed 64 KiB; what follows is not shown]\n")
        return bool(chunk)

    def _show(self, data: bytes) -> None:
        self._shown += len(data)
        data = data.translate(None, CONTROL)
        for start in range(0, len(data), select.PIPE_BUF):  # so much is written without waiting, where any is
            try:
                if select.select((), (self.screen,), (), 0)[1]:
                    write(self.screen, data[start : start + select.PIPE_BUF])
            except OSError:  # the terminal is gone
                return


def watch(worker: int, requests: int, output: WorkerOutput) -> int:
    """Wait until the worker ends or the trainer closes its side; kill the rest; return the worker's exit code."""
    trainer = os.getppid()
    woken, wake = os.pipe()
    for end in (woken, wake, output.source):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    ready = select.poll()
    ready.register(requests, 0)  # only whether it was hung up: what is in it is the worker's
    ready.register(woken, select.POLLIN)
    ready.register(output.source, select.POLLIN)
    status: int | None = None
    while status is None and os.getppid() == trainer:
        events = dict(ready.poll(1000))
        if requests in events or (woken in events and signal.SIGTERM in read(woken, 4096)):
            break
        if output.source in events and not output.read():
            ready.unregister(output.source)
        status = reap(worker)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)
    kill_descendants(getpid())
    while output.read():
        pass
    return 0 if status is None else status


def reap(worker: int) -> int | None:
    """Collect what has ended; return the worker's exit code, 128 and more for a signal, if it was among them."""
    code = None
    try:
        while (ended := waitpid(-1, WNOHANG))[0]:
            if ended[0] == worker:
                status = os.waitstatus_to_exitcode(ended[1])
                code = status if status >= 0 else 128 - status
    except ChildProcessError:
        pass
    return code


def receive(source: int, count: int) -> bytes:
    """Read so many bytes, fewer at the end."""
    data = bytearray()
    while len(data) < count and (chunk := read(source, min(count - len(data), 2**20))):
        data += chunk
    return bytes(data)


def send(target: int, data: bytes) -> None:
    """Write all of it."""
    view = memoryview(data)
    while view:
        view = view[write(target, view) :]


def close(ends: list[int]) -> None:
    """Close descriptors, once."""
    while ends:
        os.close(ends.pop())


def serve(requests: int, answers: int) -> None:
    """Answer calls until there are no more."""

    def answer(call: bytes, body: bytes) -> None:
        send(answers, HEADER.pack(call, len(body)) + body)

    while len(header := receive(requests, HEADER.size)) == HEADER.size:
        call, length = HEADER.unpack(header)
        preparation, payload = loads(receive(requests, length))
        try:
            prepare(preparation)
            explainer()
            function, shared, pickled = loads(payload)
            arguments = [loads(argument) for argument in pickled]
        except BaseException as error:  # foreign code may even raise SystemExit
            answer(call, failure(error))
        else:
            answer(call, b'["started", null]')
            for argument in arguments:
                answer(call, outcome(function, shared, argument))
                restore_output()
        end_children()  # not between two arguments: `shared` may hold a process


def outcome(function: Callable[[object, object], object], shared: object, argument: object) -> bytes:
    """Call a function; return the body of its answer."""
    try:
        body = encode(["value", function(shared, argument)]).encode()
        if len(body) > ANSWER_BYTES:
            raise ValueError(f"what it returned takes {len(body)} bytes, expected at most {ANSWER_BYTES}")
    except BaseException as error:  # a reward may even raise SystemExit
        return failure(error)
    return body


def failure(error: BaseException) -> bytes:
    """Return the body of an answer that is an error."""
    return encode(["error", explainer()(error)]).encode()


@cache
def explainer() -> Callable[[BaseException], str]:
    """Import the function that describes errors, once the import path is the trainer's."""
    from rlkit.base.errors import explain_foreign

    return explain_foreign


def end_children() -> None:
    """Kill what calls have started and left running, daemons too: as a subreaper the worker is their parent."""
    if has_children():
        kill_descendants(getpid())
        if not has_children():
            print_once("[this worker has killed processes that a call had left running]")


@cache
def print_once(line: str) -> None:
    """Print a line on the worker's standard error."""
    print(line, file=outputs[1])


def has_children() -> bool:
    """Collect the children that have ended; return whether any is alive."""
    try:
        while waitpid(-1, WNOHANG)[0]:
            continue
    except ChildProcessError:
        return False
    return True


def restore_output() -> None:
    """Undo what a call has done to `sys.stdout` and `sys.stderr`; closing these leaves the descriptors open."""
    if not outputs or any(stream.closed for stream in outputs):
        outputs[:] = [
            open(end, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            for end in (1, 2)
        ]
    sys.stdout, sys.stderr = outputs


def prepare(preparation: dict[str, object]) -> None:
    """Take over the trainer's import path and working directory: what has changed of them."""
    from multiprocessing import spawn

    changed = {name: value for name, value in preparation.items() if prepared.get(name) != value}
    prepared.update(changed)
    spawn.prepare(changed)


def main() -> None:
    """Start the worker and watch it; the argument is the descriptor of the screen."""
    requests, answers, screen = os.dup(0), os.dup(1), int(sys.argv[1])
    null = os.open(os.devnull, os.O_RDWR)
    printed, prints = os.pipe()
    watcher = os.getpid()
    prctl(SUBREAPER, 1)  # whose parent ends becomes the watcher's child, a daemon too
    worker = os.fork()
    os.dup2(null, 0)
    if worker == 0:
        prctl(PDEATHSIG, signal.SIGKILL)
        if os.getppid() != watcher:
            os._exit(1)
        os.setsid()
        os.dup2(prints, 1)
        os.dup2(prints, 2)
        close([screen, null, printed, prints])
        os.register_at_fork(after_in_child=partial(close, [requests, answers]))
        prctl(SUBREAPER, 1)  # not inherited
        restore_output()
        faulthandler.enable()
        sys.modules["__main__"] = types.ModuleType("__main__")  # nothing that is sent finds this file in it
        serve(requests, answers)
        os._exit(0)
    os.dup2(null, 1)
    close([answers, prints])
    output = WorkerOutput(printed, screen)
    code = watch(worker, requests, output)
    os.write(2, output.tail)
    os._exit(code)


if __name__ == "__main__":
    main()

"""Runs a piece of Python where it can do no harm: a script, started afresh for each piece.

It reads a JSON object (`code`, `folder`, `view`, `user`, the limits, `layers`) and writes one: `layers`, those that
took; `failed`, why the others did not; `output`, what the code wrote; `ended`, how.

    supervisor     makes the namespaces, keeps the time, reads the output, kills what is left
      first        process 1 of the new namespace: whatever else lives there dies with it
        worker     gives up its rights for good, then runs the code

Two layers can hide the machine's files and processes: `namespaces`, and where those are refused `landlock`. `user`
(where rlkit runs as root) and `seccomp` are added to either. If `layers` is not null and others took, nothing is run.
"""

from __future__ import annotations

import ast
import json
import linecache
import os
import resource
import select
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable
from typing import Any

sys.path.insert(0, sys.argv[1])  # where rlkit is
from rlkit_code import sandbox
from rlkit_code.sandbox import OPEN_FILES, kernel

sys.path.pop(0)

CELL = "<cell>"
FRAMES = 4
"""Number of innermost calls that a traceback shows."""


def limit(spec: dict[str, Any]) -> None:
    """Set the limits of every process of the code."""
    limits = {
        resource.RLIMIT_AS: spec["memory_mb"] * 2**20,
        resource.RLIMIT_CPU: int(spec["seconds"]) + 1,
        resource.RLIMIT_NPROC: spec["processes"] + (0 if spec["user"] else 2),  # with the two above the worker
        resource.RLIMIT_FSIZE: spec["file_mb"] * 2**20,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    sandbox.restrict_limits(limits)


def give_up(spec: dict[str, Any], took: Callable[..., bool], *, separated: bool) -> None:
    """Drop permanently every right that the code must not have."""
    limit(spec)
    owner = not (spec["user"] and took("user", sandbox.become, spec["user"])) and not separated
    sandbox.drop_rights()
    if not separated:
        took("landlock", sandbox.landlock, spec["folder"], sandbox.readable(), owner=owner)
    took("seccomp", sandbox.filter_calls, sandbox.rules(owner=owner))


def run(code: str) -> int:
    """Run code as a notebook runs a cell; return an exit status."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = [""]
    sys.path.insert(0, "")
    linecache.cache[CELL] = (len(code), None, code.splitlines(keepends=True), CELL)
    try:
        tree = ast.parse(code, CELL)
        last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
        steps = compile(tree, CELL, "exec"), compile(ast.Interactive(last), CELL, "single")  # which prints the value
        for step in steps:
            exec(step, vars(main))
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename != CELL:
            trace = trace.tb_next
        sys.stderr.write("".join(traceback.format_exception(type(error), error, trace, limit=-FRAMES)))
        return 1
    return 0


def work(spec: dict[str, Any], report: dict[str, Any], took: Callable[..., bool], output: int, status: int) -> int:
    """Be the worker: give up all rights, say which layers took, run the code; return an exit status."""
    os.setsid()
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    status = os.dup2(status, 3)
    os.closerange(4, OPEN_FILES)
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    os.chdir(spec["folder"])
    give_up(spec, took, separated="namespaces" in report["layers"])
    os.write(status, json.dumps(report).encode())
    os.close(status)
    return run(spec["code"]) if spec["layers"] in (None, report["layers"]) else 1


class Output:
    """The code's output, without its middle if it is long."""

    def __init__(self, descriptor: int, chars: int) -> None:
        self.descriptor = descriptor
        self.chars = chars
        self.kept = bytearray()

    def read(self) -> bool:
        """Read some of it; return whether there may be more."""
        chunk = os.read(self.descriptor, 2**16)
        self.kept += chunk
        enough = 4 * self.chars  # bytes, of which a character has at most four
        if len(self.kept) > 2 * enough:
            del self.kept[enough:-enough]
        return bool(chunk)

    def text(self) -> str:
        """Return at most so many characters, and a note where some are missing."""
        text = self.kept.decode(errors="replace")
        half = self.chars // 2
        return text if len(text) <= self.chars else f"{text[:half]}\n[... output cut ...]\n{text[len(text) - half :]}"


def supervise(first: int, output: Output, deadline: float, *, separated: bool) -> int | None:
    """Read what the code writes until it ends or the deadline passes; kill what is left; return its exit status."""
    ready = select.poll()
    ended = os.pidfd_open(first)
    ready.register(ended, select.POLLIN)
    ready.register(output.descriptor, select.POLLIN)
    status = None
    try:
        while (left := deadline - time.monotonic()) > 0:
            events = dict(ready.poll(1000 * left))
            if output.descriptor in events and not output.read():
                ready.unregister(output.descriptor)
            if ended in events:
                status = os.waitid(os.P_PIDFD, ended, os.WEXITED | os.WNOWAIT).si_status
                break
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sandbox.end_all(first if separated else None)
    while output.read():
        pass
    return status


def main() -> int:
    """Run what standard input says."""
    started = time.monotonic()
    spec: dict[str, Any] = json.load(sys.stdin)
    report: dict[str, Any] = {"layers": [], "failed": {}}

    def took(layer: str, action: Callable[..., None], *args: Any, **kwargs: Any) -> bool:
        try:
            action(*args, **kwargs)
        except OSError as error:
            report["failed"][layer] = str(error)
            return False
        report["layers"].append(layer)
        return True

    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # a machine short of memory kills this before the trainer
    kernel("prctl", sandbox.PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    kernel("prctl", sandbox.SUBREAPER, 1, 0, 0, 0)
    separated = took("namespaces", sandbox.separate, spec["folder"], spec["view"], sandbox.readable())
    output, output_end = os.pipe()
    status, status_end = os.pipe()
    first = os.fork()
    if first == 0:
        kernel("prctl", sandbox.PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        worker = os.fork()
        if worker == 0:
            return work(spec, report, took, output_end, status_end)
        os.closerange(0, OPEN_FILES)
        os._exit(sandbox.wait_for(worker))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.close(output_end)
    os.close(status_end)
    written = Output(output, spec["output_chars"])
    ended = supervise(first, written, started + spec["seconds"], separated=separated)
    told = os.read(status, 2**16)
    print(json.dumps({**(json.loads(told) if told else report), "output": written.text(), "ended": ended}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

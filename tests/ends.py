"""Runs of `rlkit fit` with servers that end in any way, at any moment, and what they leave on the machine."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import read_jsonl
from tests.served import children

KILLED = ("Ctrl-C", "trainer killed", "server killed")
WAYS = [
    ("normal", "sampling"),
    *((end, "sampling") for end in KILLED),
    *(pytest.param(end, moment, marks=pytest.mark.stress) for end in KILLED for moment in ("start", "sync")),
]
"""Ways to end a run, each with the moment of its end."""

LAST_STEPS = 2
"""Of a run that is not ended, or whose server was started again."""

SYNC = 3
"""The sync of weights in which a run is ended, or its server."""

HELD_SYNC = f"""\
import pathlib, sys, time
from rlkit.cli.main import main
from rlkit.models.weights import PolicyWeights

buckets, syncs = PolicyWeights.buckets, []

def held(weights):
    syncs.append(weights)
    for bucket in buckets(weights):
        yield bucket
        if len(syncs) == {SYNC}:
            pathlib.Path("syncing").touch()
            time.sleep(2)

PolicyWeights.buckets = held
sys.exit(main())
"""
"""The command line, which stops for two seconds after each part of the weights in one of the syncs."""

Snapshot = dict[str, set[object]]


def leaves_nothing(folder: Path, end: str, moment: str, *engine: str) -> None:
    """Run `fit` until it ends in one way; no file, shared memory, process or port is left of it.

    Delays are drawn from `RLKIT_TEST_SEED`. What other processes leave in /tmp and /dev/shm meanwhile counts: on a
    machine with others, run this in a namespace with its own (`unshare --mount`).
    """
    draw = random.Random(f"{os.environ.get('RLKIT_TEST_SEED', '0')} {end} {moment}")
    temporary = Path(tempfile.mkdtemp(prefix="rlkit-"))  # short enough for sockets
    before = on_machine(temporary)
    steps = LAST_STEPS if end == "normal" else 500
    options = ("--recipe=quickstart", f"--train.steps={steps}", "--validation=null", "--out=out", *engine)
    program = ("-c", HELD_SYNC) if moment == "sync" else ("-m", "rlkit")
    environment = {**os.environ, "TMPDIR": str(temporary)}
    run = subprocess.Popen((sys.executable, *program, "fit", *options), cwd=folder, env=environment)
    try:
        wait_for_moment(run, folder, moment, draw)
        during = on_machine(temporary)
        if end == "server killed":
            os.kill(children(supervisors(run.pid)[-1])[0], signal.SIGKILL)
        if end == "server killed" and moment != "start":
            steps = len(wait_for_steps(run, folder, 1))
            wait_for_steps(run, folder, steps + LAST_STEPS)  # with the server that was started again
        if end == "trainer killed":
            run.kill()
        elif (end, moment) not in (("normal", "sampling"), ("server killed", "start")):
            run.send_signal(signal.SIGINT)
        status = run.wait(300)
    finally:
        run.kill()
    expected = {"normal": 0, "trainer killed": -signal.SIGKILL}.get(end, 130)
    assert status == (1 if (end, moment) == ("server killed", "start") else expected)
    deadline = time.monotonic() + 60  # a supervisor survives its trainer for as long as its server has to end
    while (after := on_machine(temporary)) != before and time.monotonic() < deadline:
        time.sleep(0.1)
    for kind, names in before.items():
        print(f"{end}, {moment}: {kind} {len(names)} -> {len(during[kind])} -> {len(after[kind])}")
    left = {kind: names - before[kind] for kind, names in after.items() if names - before[kind]}
    assert not left
    shutil.rmtree(temporary)


def wait_for_moment(run: subprocess.Popen[bytes], folder: Path, moment: str, draw: random.Random) -> None:
    """Return while the server starts, while it samples, or while it gets weights."""
    if moment == "sync":
        wait_until(run, (folder / "syncing").exists)
    elif moment == "sampling":
        wait_for_steps(run, folder, 1)
    else:
        wait_until(run, lambda: any(map(children, supervisors(run.pid))))
        if draw.random() < 0.5:  # its own processes start
            wait_until(run, lambda: any(map(children, children(supervisors(run.pid)[-1]))))
    time.sleep(draw.uniform(0, 1))


def wait_until(run: subprocess.Popen[bytes], event: Callable[[], bool]) -> None:
    """Return once something has happened in a run that has not ended."""
    while not event():
        assert run.poll() is None
        time.sleep(0.05)


def wait_for_steps(run: subprocess.Popen[bytes], folder: Path, steps: int) -> list[dict[str, Any]]:
    """Return the metrics of a run once it has made so many steps."""
    metrics = folder / "out" / "metrics.jsonl"
    wait_until(run, lambda: metrics.exists() and metrics.read_text().count("\n") >= steps)
    return read_jsonl(metrics)


def supervisors(pid: int) -> list[int]:
    """Return the supervisors of a run's servers, those of rank 0 first; weights that are shared may have one, too."""
    direct = [p for p in children(pid) if b"/server.log\0" in command_line(p)]
    return direct + [s for p in children(pid) if p not in direct for s in supervisors(p)]


def command_line(pid: int) -> bytes:
    """Return the words of a process, each with a NUL after it; nothing of one that has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def on_machine(temporary: Path) -> Snapshot:
    """Return shared memory, temporary files, and the processes whose these are with the ports on which they listen.

    What later compilations read is left out.
    """
    processes = [process for process in psutil.process_iter() if uses(process, temporary)]
    return {
        "/dev/shm": set(os.listdir("/dev/shm")),
        "/tmp": set(os.listdir("/tmp")),
        "TMPDIR": {name for name in os.listdir(temporary) if not name.startswith("torchinductor_")},
        "processes": set(processes),
        "ports": {port for process in processes for port in listening(process)},
    }


def uses(process: psutil.Process, temporary: Path) -> bool:
    """Whether a process or one that has started it was given a folder for temporary files, or one in it."""
    with suppress(psutil.Error):
        return Path(process.environ().get("TMPDIR", "/")).is_relative_to(temporary)
    return False


def listening(process: psutil.Process) -> set[int]:
    """Return the ports on which a process listens."""
    with suppress(psutil.Error):
        return {c.laddr.port for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    return set()

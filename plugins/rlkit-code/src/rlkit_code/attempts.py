"""Tries what should be impossible in a sandbox.

A part's `bind` runs this file there, followed by a call of `report`.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

Ways = Sequence[Callable[[], object]]
"""Things to try; one that returns means that there is no protection."""


def possible(way: Callable[[], object]) -> bool:
    """Print whether something can be done."""
    try:
        way()
    except (OSError, MemoryError):
        return False
    return True


def to_files(marker: str) -> Ways:
    """Return ways to reach a file outside the folder, or to write to the standard library."""
    return (
        lambda: Path(marker).read_text(encoding="utf-8"),
        lambda: os.truncate(marker, 0),
        lambda: os.chmod(marker, 0o600),
        lambda: os.close(os.open(os.__file__, os.O_WRONLY)),
    )


def to_others(pid: int) -> Ways:
    """Return ways to reach a process; none if its number is by chance this process's own in a new namespace."""
    return () if pid == os.getpid() else (
        lambda: os.kill(pid, 0),
        lambda: Path(f"/proc/{pid}/environ").read_bytes(),
        lambda: resource.prlimit(pid, resource.RLIMIT_CORE),
    )  # fmt: skip


def fork_often(count: int) -> None:
    """Start so many processes, which wait to be killed."""
    for _ in range(count):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)


def report(marker: str, port: int, pid: int, memory_mb: int | None = None, processes: int | None = None) -> None:
    """Print the names of the protections that are missing; what is None is not tried."""
    ways: dict[str, Ways] = {
        "files": to_files(marker),
        "network": (lambda: socket.create_connection(("127.0.0.1", port), timeout=1).close(),),
        "other processes": to_others(pid),
    }
    if memory_mb is not None:
        ways["memory"] = (lambda: bytearray(memory_mb * 2**20),)
    if processes is not None:
        ways["process count"] = (lambda: fork_often(processes),)
    print(json.dumps([name for name in ways if any(possible(way) for way in ways[name])]))

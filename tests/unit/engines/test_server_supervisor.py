"""The supervisor between a server and the trainer, with `sleep` as the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlkit.engines.server.process import SUPERVISOR

LIMIT_SECONDS = 60
"""Only a failing test takes as long."""

SLEEPER = "import os, subprocess, sys, time; child = subprocess.Popen(['sleep', '100']); print(os.getpid(), child.pid, flush=True); time.sleep(100)"  # noqa: E501


def start(log: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    """Return a supervisor, and the process ids of its server and the server's child."""
    supervisor = subprocess.Popen(
        (sys.executable, "-S", "-E", str(SUPERVISOR), str(log), sys.executable, "-c", SLEEPER), stdin=subprocess.PIPE
    )
    assert wait_until(lambda: log.exists() and len(log.read_text().split()) == 2)
    return supervisor, [int(word) for word in log.read_text().split()]


def wait_until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + LIMIT_SECONDS
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("how", ["trainer ends", "server crashes", "supervisor is killed"])
def test_nothing_is_left_whoever_ends_first(tmp_path: Path, how: str) -> None:
    supervisor, pids = start(tmp_path / "log")
    if how == "trainer ends":
        assert supervisor.stdin is not None
        supervisor.stdin.close()
    else:
        os.kill(supervisor.pid if how == "supervisor is killed" else pids[0], signal.SIGKILL)
    supervisor.wait(LIMIT_SECONDS)
    assert wait_until(lambda: gone(pids[0]))
    if how != "supervisor is killed":
        assert wait_until(lambda: gone(pids[1]))
    else:
        os.kill(pids[1], signal.SIGKILL)
    if how == "server crashes":
        assert "the process ended with exit code -9" in (tmp_path / "log").read_text()


def test_a_byte_is_a_signal_for_the_server(tmp_path: Path) -> None:
    supervisor, pids = start(tmp_path / "log")
    assert supervisor.stdin is not None
    supervisor.stdin.write(bytes([signal.SIGTERM]))
    supervisor.stdin.flush()
    assert supervisor.wait(LIMIT_SECONDS) == 256 - signal.SIGTERM
    assert wait_until(lambda: all(map(gone, pids)))
    assert "exit code -15" in (tmp_path / "log").read_text()


def test_once_a_supervisor_has_ended_its_server_is_gone(tmp_path: Path) -> None:
    """Its memory too, which the kernel takes a while to free."""
    code = "import os, time; held = b'rlkit' * (50 << 20); print(os.getpid(), flush=True); time.sleep(100)"
    log = tmp_path / "log"
    words = (sys.executable, "-S", "-E", str(SUPERVISOR), str(log), sys.executable, "-c", code)
    supervisor = subprocess.Popen(words, stdin=subprocess.PIPE)
    assert wait_until(lambda: log.exists() and log.read_text().strip().isdigit())
    assert supervisor.stdin is not None
    supervisor.stdin.close()
    supervisor.wait(LIMIT_SECONDS)
    assert not Path(f"/proc/{int(log.read_text().split()[0])}").exists()


def test_a_crash_that_kills_its_parent_spares_the_trainer(tmp_path: Path) -> None:
    code = "import os, signal; os.kill(os.getppid(), signal.SIGQUIT); os.kill(os.getppid(), signal.SIGINT)"
    words = (sys.executable, "-S", "-E", str(SUPERVISOR), str(tmp_path / "log"), sys.executable, "-c", code)
    supervisor = subprocess.Popen(words, stdin=subprocess.PIPE)
    assert supervisor.wait(LIMIT_SECONDS) == 0
    assert "ended with exit code 0" in (tmp_path / "log").read_text()

"""A run folder belongs to one run at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlkit.base.errors import RecipeError
from rlkit.cli.main import main
from rlkit.run.lock import Lock

HOLD = """
import os, sys, time
from pathlib import Path
from rlkit.run.lock import Lock

lock = Lock(Path(sys.argv[1]))
child = os.fork()
if child == 0:  # as a reward's process that outlives the run
    time.sleep(60)
print(child, flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that holds `run`, and its child, which does not."""
    process = subprocess.Popen((sys.executable, "-c", HOLD, tmp_path / "run"), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    yield process, child
    process.kill()
    process.wait()
    os.kill(child, signal.SIGKILL)


def test_a_second_run_in_a_folder_is_refused(
    tmp_path: Path, holder: tuple[subprocess.Popen[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    process, child = holder
    run = tmp_path / "run"
    for more in ((), ("--resume=auto",)):
        assert main(["fit", "--recipe=quickstart", "--fabric.accelerator=cpu", f"--out={run}", *more]) == 2
        message = capsys.readouterr().err
        assert f"error: '{run}' is in use by process {process.pid} on {os.uname().nodename} since 20" in message
    assert sorted(os.listdir(run)) == ["lock"]
    process.send_signal(signal.SIGKILL)
    process.wait()
    os.kill(child, 0)  # it lives on, and does not matter
    lock = Lock(run)
    assert lock.warning is None
    assert run.stat().st_mode & 0o777 == 0o700
    assert f'"pid": {os.getpid()}' in (run / "lock").read_text()
    lock.release()


def test_a_folder_without_locks_is_used_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    lock = Lock(tmp_path / "run")
    assert lock.warning is not None
    assert "has no locks (No locks available)" in lock.warning
    lock.release()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match="--out is .*file/run', which cannot be written"):
        Lock(tmp_path / "file" / "run")


def test_a_full_disk_holds_the_lock_without_its_description(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first file of the run says that the disk is full."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    Lock(tmp_path / "run").release()

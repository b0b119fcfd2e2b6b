"""The supervisor between a server and the trainer, with `sleep` as the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
from rlkit_servers.process import SUPERVISOR, TemporaryFolder, kill_supervised

from tests.events import gone, wait_until

LIMIT_SECONDS = 60
"""Only a failing test takes as long."""

SLEEPER = "import os, subprocess, sys, time; child = subprocess.Popen(['sleep', '100']); print(os.getpid(), child.pid, flush=True); time.sleep(100)"  # noqa: E501


def supervised(log: Path, grace: float = 0.0, folder: str = "") -> tuple[str, ...]:
    return (sys.executable, "-S", "-E", str(SUPERVISOR), str(log), str(grace), folder)


def start(log: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    """Return a supervisor, and the process ids of its server and the server's child."""
    supervisor = subprocess.Popen((*supervised(log), sys.executable, "-c", SLEEPER), stdin=subprocess.PIPE)
    wait_until(lambda: log.exists() and len(log.read_text().split()) == 2)
    return supervisor, [int(word) for word in log.read_text().split()]


@pytest.mark.parametrize("how", ["trainer ends", "server crashes", "supervisor is killed"])
def test_nothing_is_left_whoever_ends_first(tmp_path: Path, how: str) -> None:
    supervisor, pids = start(tmp_path / "log")
    if how == "trainer ends":
        assert supervisor.stdin is not None
        supervisor.stdin.close()
    else:
        os.kill(supervisor.pid if how == "supervisor is killed" else pids[0], signal.SIGKILL)
    supervisor.wait(LIMIT_SECONDS)
    wait_until(lambda: gone(pids[0]))
    if how != "supervisor is killed":
        wait_until(lambda: gone(pids[1]))
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
    wait_until(lambda: all(map(gone, pids)))
    assert "exit code -15" in (tmp_path / "log").read_text()


def test_once_a_supervisor_has_ended_its_server_is_gone(tmp_path: Path) -> None:
    """Its memory too, which the kernel takes a while to free."""
    code = "import os, time; held = b'rlkit' * (50 << 20); print(os.getpid(), flush=True); time.sleep(100)"
    log = tmp_path / "log"
    words = (*supervised(log), sys.executable, "-c", code)
    supervisor = subprocess.Popen(words, stdin=subprocess.PIPE)
    wait_until(lambda: log.exists() and log.read_text().strip().isdigit())
    assert supervisor.stdin is not None
    supervisor.stdin.close()
    supervisor.wait(LIMIT_SECONDS)
    assert not Path(f"/proc/{int(log.read_text().split()[0])}").exists()


def test_a_crash_that_kills_its_parent_spares_the_trainer(tmp_path: Path) -> None:
    code = "import os, signal; os.kill(os.getppid(), signal.SIGQUIT); os.kill(os.getppid(), signal.SIGINT)"
    words = (*supervised(tmp_path / "log"), sys.executable, "-c", code)
    supervisor = subprocess.Popen(words, stdin=subprocess.PIPE)
    assert supervisor.wait(LIMIT_SECONDS) == 0
    assert "ended with exit code 0" in (tmp_path / "log").read_text()


SERVER = """
import os, signal, sys, tempfile
from _multiprocessing import SemLock
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory

def hold(name):
    memory, lock = SharedMemory(name), SemLock._rebuild(-1, 1, 1, f"/{name}")
    print(os.getppid(), name, flush=True)
    signal.pause()

if __name__ == "__main__":
    memory, shared = SharedMemory(create=True, size=1 << 20), SharedMemory(sys.argv[2])
    lock = SemLock(1, 1, 1, f"/{memory.name}", False)  # no resource tracker knows it
    open(tempfile.mkstemp()[1], "w").close()
    if sys.argv[1] == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    get_context("spawn").Process(target=hold, args=(memory.name,)).start()
    signal.pause()
"""


@pytest.mark.parametrize("how", ["trainer ends", "trainer ends, server is deaf", "server crashes", "server is closed"])
def test_a_server_leaves_no_memory_and_no_files(tmp_path: Path, how: str) -> None:
    """Nor memory of its children, or memory that another process has mapped."""
    program, folder, log = tmp_path / "server.py", tmp_path / "folder", tmp_path / "log"
    program.write_text(SERVER)
    folder.mkdir()
    shared = SharedMemory(create=True, size=4096)
    supervisor = subprocess.Popen(
        (*supervised(log, 0.5, str(folder)), sys.executable, str(program), how.rpartition(" ")[2], shared.name),
        stdin=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    wait_until(lambda: log.exists() and len(log.read_text().split()) == 2)
    pid, memory = log.read_text().split()
    assert Path("/dev/shm", memory).exists()
    assert Path("/dev/shm", f"sem.{memory}").exists()
    assert list(folder.iterdir())
    if how == "server crashes":
        os.kill(int(pid), signal.SIGKILL)
        supervisor.wait(LIMIT_SECONDS)
    if how.startswith("trainer ends"):
        assert supervisor.stdin is not None
        supervisor.stdin.close()
        supervisor.wait(LIMIT_SECONDS)
    else:
        kill_supervised(supervisor)
    assert not Path("/dev/shm", memory).exists()
    assert not Path("/dev/shm", f"sem.{memory}").exists()
    assert Path("/dev/shm", shared.name).exists()
    shared.close()
    shared.unlink()
    assert folder.exists() != how.startswith("trainer ends")
    assert ("exit code -15" in log.read_text()) == (how in ("trainer ends", "server is closed"))


def test_a_server_leaves_nothing_on_a_full_disk(tmp_path: Path) -> None:
    """Its log cannot be written."""
    folder, started = tmp_path / "folder", tmp_path / "started"
    folder.mkdir()
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(100)"
    words = (*supervised(Path("/dev/full"), 0.5, str(folder)), sys.executable, "-c", code, str(started))
    supervisor = subprocess.Popen(words, stdin=subprocess.PIPE)
    wait_until(lambda: started.exists() and started.read_text().isdigit())
    assert supervisor.stdin is not None
    supervisor.stdin.close()
    assert supervisor.wait(LIMIT_SECONDS) == 256 - signal.SIGTERM
    assert gone(int(started.read_text()))
    assert not folder.exists()


def test_a_temporary_folder_does_not_outlive_its_process(tmp_path: Path) -> None:
    code = (
        "import os; from rlkit_servers.process import TemporaryFolder\n"
        f"folders = [TemporaryFolder('t-', {str(tmp_path)!r}) for _ in range(2)]\n"
        "folders[0].remove(); print(*(folder.path.exists() for folder in folders), flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "True"], done.stderr
    wait_until(lambda: not list(tmp_path.iterdir()))


def test_no_folder_is_left_without_a_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*command: object, **options: object) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", no_memory)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        TemporaryFolder("t-", str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_buckets_file_does_not_outlive_the_trainer(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, torch; from rlkit_servers import transports\n"
        "class Files(transports.FileTransport):\n    load = None\n"
        f"transports.SHARED_MEMORY = pathlib.Path({str(tmp_path)!r})\n"
        "print(Files().prepare([('a', torch.ones(1))]).exists(), flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr
    wait_until(lambda: not list(tmp_path.iterdir()))

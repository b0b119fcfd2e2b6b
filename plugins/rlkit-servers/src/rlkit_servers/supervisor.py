"""Runs a command and outlives it: `python supervisor.py LOG GRACE FOLDER COMMAND…`, with a pipe as standard input.

The trainer holds the pipe's other end. A byte in it is the number of a signal for the command; 0 says that FOLDER is
still needed. Once the pipe is closed, by the trainer or by its death, the command gets SIGTERM and GRACE seconds; then
its process group is killed, and what it leaves is removed: shared memory that nobody else has mapped, and FOLDER. Some
servers kill their parent when they crash; this process is that parent, so that the trainer survives. It imports only
the standard library, so that it starts at once.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading

PR_SET_PDEATHSIG = 1
SHARED_MEMORY = "/dev/shm/"
LONGEST_INTERVAL = 60.0
"""Seconds between two looks at what the command has mapped; they begin with half a second and double."""


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when the supervisor dies, if it can (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _mapped(group: int, inside: bool = True) -> "set[str]":
    """Return the files of shared memory that are mapped by the processes of a group, or by all others.

    Files are told by device and inode: a semaphore is mapped under a name that it has no more. Files of the trainer's
    are left out, which other servers may still have to read.
    """
    mapped = set()
    for name in filter(str.isdecimal, os.listdir("/proc") if sys.platform == "linux" else ()):
        with contextlib.suppress(OSError, IndexError):
            with open(f"/proc/{name}/stat", "rb") as stat:
                in_group = int(stat.read().rpartition(b")")[2].split()[2]) == group
            if in_group == inside:
                with open(f"/proc/{name}/maps", encoding="utf-8", errors="surrogateescape") as maps:
                    mapped |= {tuple(line.split()[3:5]) for line in maps if SHARED_MEMORY in line}
    files = set()
    for name in os.listdir(SHARED_MEMORY) if mapped else ():
        with contextlib.suppress(OSError):
            status = os.lstat(SHARED_MEMORY + name)
            device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
            if (device, str(status.st_ino)) in mapped and not name.startswith("rlkit-"):
                files.add(SHARED_MEMORY + name)
    return files


class _Pipe(threading.Thread):
    """Sends each signal whose number the trainer writes, until it closes the pipe; then ends the command.

    Args:
        command: The process.
        grace: Seconds between SIGTERM and SIGKILL.
    """

    def __init__(self, command: "subprocess.Popen[bytes]", grace: float) -> None:
        super().__init__(daemon=True)
        self.command = command
        self.grace = grace
        self.mapped: set[str] = set()
        self.folder_is_needed = False
        self.closed = False

    def run(self) -> None:
        for [number] in iter(lambda: os.read(0, 1), b""):
            if number:
                self._send(number)
            else:
                self.folder_is_needed = True
        self.closed = True
        self.mapped = _mapped(self.command.pid)
        if self.grace:
            self._send(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.command.wait(self.grace)
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.command.send_signal(number)


def main(log: str, grace: float, folder: str, command: "list[str]") -> None:
    """Start the command and wait until it ends; the end of the trainer ends it.

    This process ends after the command, whose memory is free by then.
    """
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    with open(log, "ab") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 (no other thread runs yet)
        )
    pipe = _Pipe(process, grace)
    pipe.start()
    mapped, interval, code = set(), 0.5, None
    while code is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(interval)
        mapped |= _mapped(process.pid)
        interval = min(2 * interval, LONGEST_INTERVAL)
    with contextlib.suppress(OSError), open(log, "a", encoding="utf-8") as file:  # its disk may be full
        file.write(f"\n[rlkit] the process ended with exit code {code}\n")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for path in (mapped | pipe.mapped) - _mapped(process.pid, inside=False):
        with contextlib.suppress(OSError):
            os.unlink(path)
    if folder and pipe.closed and not pipe.folder_is_needed:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(code % 256)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3], sys.argv[4:])

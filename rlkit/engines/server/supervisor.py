"""Runs a server and outlives it: `python supervisor.py LOG COMMAND…`, with a pipe from the trainer as standard input.

Some servers kill their parent when they crash; the supervisor is that parent, so that the trainer survives. The server
runs in its own process group, which is killed when the server ends, the trainer closes the pipe, or the trainer dies.
A byte in the pipe is the number of a signal for the server. The supervisor imports only the standard library, so that
it starts immediately.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading

PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when the supervisor dies, if it can (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill(server: "subprocess.Popen[bytes]") -> None:
    """Kill the server's process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)


def _wait_for_trainer(server: "subprocess.Popen[bytes]") -> None:
    """Send each signal whose number the trainer writes, until it closes the pipe."""
    for number in iter(lambda: os.read(0, 1), b""):
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.pid, number[0])
    _kill(server)


def main(log: str, command: list[str]) -> None:
    """Start the server and wait until it ends; the end of the trainer ends it.

    This process ends after the server, whose memory is free by then.
    """
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    with open(log, "ab") as file:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 (no other thread runs yet)
        )
    threading.Thread(target=_wait_for_trainer, args=(server,), daemon=True).start()
    code = server.wait()
    with open(log, "a", encoding="utf-8") as file:
        file.write(f"\n[rlkit] the process ended with exit code {code}\n")
    _kill(server)
    os._exit(code % 256)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

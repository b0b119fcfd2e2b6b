"""Runs a server and outlives it: `python supervisor.py LOG COMMAND…`, with a pipe to the trainer as its input.

Some servers kill their parent when they crash; this one stands between them and the trainer. The server has a
process group of its own, which is killed when the server ends, when the trainer closes the pipe, and when it dies.
It imports nothing but the standard library, so that it is there at once.
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
    """Be killed when the supervisor is, where the kernel can do that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill(server: "subprocess.Popen[bytes]") -> None:
    """Kill the server and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)


def _wait_for_trainer(server: "subprocess.Popen[bytes]") -> None:
    while os.read(0, 1):
        pass
    _kill(server)


def main(log: str, command: list[str]) -> None:
    """Start the server and wait for its end, which that of the trainer brings about.

    Once this process has ended, the server has, and what memory it held is free.
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
        file.write(f"\n[rlkit] the server ended with exit code {code}\n")
    _kill(server)
    os._exit(code % 256)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

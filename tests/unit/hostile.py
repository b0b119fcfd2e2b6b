"""What rewards do to their workers, by name; light, since workers import it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import rlkit
from rlkit.interfaces.reward import OnError, RewardFunction
from rlkit.types import Score, Trajectory


class Unserialisable(float):
    """A number that can be told to nobody."""

    def __reduce__(self) -> Any:
        raise RuntimeError("not to be pickled")

    def __repr__(self) -> str:
        raise RuntimeError("not to be shown")


class Trap:
    """Harms whoever unpickles it."""

    def __reduce__(self) -> Any:
        return os.system, ("touch unpickled",)


class Silent(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def endless() -> list[Any]:
    """Return a list that holds itself."""
    loop: list[Any] = []
    loop.append(loop)
    return loop


def descriptors() -> list[int]:
    """Return all open descriptors."""
    return [int(name) for name in os.listdir("/proc/self/fd")]


def write_everywhere(data: bytes) -> None:
    """Write to each descriptor that takes it."""
    for descriptor in descriptors():
        with contextlib.suppress(OSError):
            os.set_blocking(descriptor, False)
            os.write(descriptor, data)


def frame(call: bytes, body: Any) -> bytes:
    """Make a frame of an answer."""
    data = json.dumps(body).encode()
    return call + len(data).to_bytes(8, "big") + data


def own_call() -> bytes:
    """Find out the id of the call in progress, as the code around it has it."""
    found = sys._getframe()
    while "call" not in found.f_locals or not isinstance(found.f_locals["call"], bytes):
        assert found.f_back is not None
        found = found.f_back
    return found.f_locals["call"]


def later(seconds: float, action: Any) -> None:
    """Do something from a thread, when the call is over."""
    threading.Timer(seconds, action).start()


def note(folder: str) -> None:
    """Leave this process's number where a test finds it."""
    Path(folder, str(os.getpid())).touch()


def sleep(folder: str) -> None:
    """Leave a number, and sleep for long."""
    note(folder)
    time.sleep(600)
    os._exit(0)


def daemon(folder: str, *, closing: bool = False) -> None:
    """Start a process that has left its parent, its session and its signals behind."""
    if (child := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            if closing:
                os.closerange(0, 256)
            sleep(folder)
        os._exit(0)
    os.waitpid(child, 0)
    while not os.listdir(folder):
        time.sleep(0.005)


def children(how: str, folder: str) -> str:
    """Start processes that nobody ends."""
    if how == "fork":
        if (child := os.fork()) == 0:
            sleep(folder)
        Path(folder, str(child)).touch()
    if how == "subprocess":
        started = subprocess.Popen(("sleep", "600"), env={})  # without the environment, too
        Path(folder, str(started.pid)).touch()
    if how == "daemon":
        daemon(folder)
    if how == "closing daemon":
        daemon(folder, closing=True)
    if how == "orphan of a killed watcher":
        daemon(folder)
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    if how == "stopped watcher":
        daemon(folder)
        os.kill(os.getppid(), signal.SIGSTOP)
    note(folder)
    return "started"


def start(call: tuple[str, str]) -> str:
    """Start processes as told."""
    return children(*call)


def start_and_hang(call: tuple[str, ...]) -> None:
    """Start processes as told, leave a number in the last folder, and outlast every deadline."""
    children(*call[:2])
    sleep(call[-1])


class Named:
    """Is pickled as a function of some module."""

    def __init__(self, module: str, name: str) -> None:
        self.where = module, name

    def __reduce__(self) -> Any:
        return find, self.where


def find(module: str, name: str) -> Any:
    """Import a function."""
    return getattr(importlib.import_module(module), name)


def double(number: int) -> int:
    """Do what is right."""
    return 2 * number


def obey(what: str) -> object:  # noqa: PLR0912, PLR0915
    """Misbehave in a worker as told."""
    match what:
        case "pid":
            return os.getpid()
        case "raise":
            raise ValueError("of the reward")
        case "raise at length":
            raise ValueError("x" * 50_000_000)
        case "raise silently":
            raise Silent
        case "raise a surrogate":
            raise ValueError("\udc80")
        case "exit":
            raise SystemExit(3)
        case "_exit":
            os._exit(0)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)
        case "hang":
            time.sleep(600)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "unserialisable":
            return object()
        case "trap":
            return Trap()
        case "endless":
            return endless()
        case "large":
            return "x" * 17_000_000
        case "print":
            for _ in range(100):
                print("x" * 1_000_000)
            return "printed"
        case "garbage":
            write_everywhere(b"\x80\x04garbage")
        case "garbage in part":
            write_everywhere(own_call()[:7])
            time.sleep(600)
        case "zeros":
            write_everywhere(bytes(3))
        case "forged id":
            write_everywhere(frame(bytes(16), ["value", -1]))
        case "forged answer":
            write_everywhere(frame(own_call(), ["value", -1]))
        case "forged nonsense":
            write_everywhere(frame(own_call(), {"a": 1, "b": 2}))
        case "forged twice started":
            write_everywhere(frame(own_call(), ["started", None]))
        case "deep":
            write_everywhere(own_call() + (60_000).to_bytes(8, "big") + b"[" * 60_000)
            time.sleep(600)
        case "garbage afterwards":
            later(0.05, lambda: write_everywhere(b"garbage"))
        case "exit afterwards":
            later(0.05, lambda: os._exit(0))
        case "close":
            os.closerange(0, 256)
        case "patch the encoder":
            json.dumps = lambda *_, **__: '["value", -1]'
            json.loads = pickle.loads = lambda *_: [obey, 0, ["_exit"]]  # type: ignore[assignment]
        case "patch the system":  # as guards do that are meant for a process of their own
            for name in ("read", "write", "kill", "waitpid", "listdir", "getpid", "fork", "chdir"):
                setattr(os, name, None)
            time.monotonic = time.sleep = None  # type: ignore[assignment]
        case "replace the output":
            sys.stdout = sys.stderr = object()  # type: ignore[assignment]
        case "close the output":
            sys.stdout.close()
            sys.stderr.close()
    return "done"


@rlkit.tool
def shout(text: str) -> str:
    """Writes in capitals.

    Args:
        text: What.
    """
    return text.upper()


@rlkit.tool
def wait(seconds: float) -> str:
    """Waits.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return f"waited {seconds:g}"


class Moody(RewardFunction):
    """Does what the text says."""

    def __init__(self, on_error: OnError = "drop", timeout: float = 1.0) -> None:
        self.on_error = on_error
        self.timeout = timeout

    def grade(self, trajectory: Trajectory) -> Score | float:
        import numpy as np

        values: dict[str, Any] = {
            "nan": float("nan"),
            "huge": 10**400,
            "infinite in float32": 1e31,
            "longer than Python shows": 10**5000,
            "text": "0.5",
            "none": None,
            "unserialisable": Unserialisable("nan"),
            "numpy": Score(np.float32(0.5), {"n": np.int64(3), "right": np.bool_(True)}, [np.float64(1)]),  # type: ignore[dict-item]
            "array": np.array([0.5]),
            "vector": np.array([0.5, 1.0]),
            "components": Score(0.5, {"a": 10**400}),
            "no components": Score(0.5, None),  # type: ignore[arg-type]
        }
        if trajectory.text in values:
            return values[trajectory.text]  # type: ignore[no-any-return]
        if trajectory.text != "fine":
            obey(trajectory.text)
        return 0.5


class Fragile(RewardFunction):
    """Does what the text says; its control is the reference. It hangs once a new file is in the folder."""

    def __init__(self, folder: str = "") -> None:
        self.folder = folder

    def grade(self, trajectory: Trajectory) -> float:
        if trajectory.text == "hang":
            sleep(self.folder)
        obey(trajectory.text)
        return 1.0

    def control(self, trajectory: Trajectory) -> Trajectory:
        return replace(trajectory, text=trajectory.prompt.answer or "")


def compare_badly(answers: tuple[str, str]) -> bool:
    """Compare, unless the given answer is broken."""
    if answers[0] == "broken":
        raise RecursionError
    return answers[0] == answers[1]


def times(factor: int, what: object) -> object:
    """Multiply numbers, do what texts say, and hang where a folder is named."""
    if isinstance(what, tuple):
        sleep(what[1])
    return factor * what if isinstance(what, int) else obey(str(what))


def meet(folder: str, _: int) -> int:
    """Wait until two processes are here; return which this one is."""
    note(folder)
    while len(os.listdir(folder)) < 2:
        time.sleep(0.005)
    return os.getpid()


class Unreadable:
    """Can be pickled, and not be read again."""

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return fail_to_read, ()


def fail_to_read() -> None:
    raise RuntimeError("cannot be read")


class Helped:
    """Starts a process once and holds it."""

    helper: subprocess.Popen[bytes] | None = None

    def ask(self, _: int) -> int:
        """Return the process's number, if it is alive."""
        self.helper = self.helper or subprocess.Popen(("sleep", "600"))
        assert self.helper.poll() is None
        return self.helper.pid

"""Run by `test_ending.py` in place of `rlkit`, on each rank: a fault comes to one rank at a stage of the run.

`RLKIT_FAULT` is a JSON object: the `rank`; the `stage`, the `entry` into it (from 1), and the `delay` in seconds after
which a SIGTERM comes, or `signals` of them; or from which call on (`mkdir`) this rank can make no folder of the run.
What was going on when it came is written into the file `fault`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlkit.cli.main import main
from rlkit.run.checkpoint.write import Saver
from rlkit.run.evaluate import Validator
from rlkit.train.metrics import Meter

FAULT = json.loads(os.environ["RLKIT_FAULT"])
HERE = int(os.environ.get("LOCAL_RANK", "0")) == FAULT["rank"]
RECORD = Path.cwd() / "fault"


class Stages:
    """Records which stage the run is in, and sends the signal."""

    def __init__(self) -> None:
        self.current, self.entries = "between", 0
        self.signal: threading.Timer | None = None

    @contextmanager
    def within(self, stage: str) -> Iterator[None]:
        before, self.current = self.current, stage
        if HERE and stage == FAULT.get("stage"):
            self.entries += 1
            if self.entries == FAULT["entry"]:
                self.signal = threading.Timer(FAULT["delay"], self.send)
                self.signal.start()
        try:
            yield
        finally:
            if self.signal is not None:
                self.signal.join()  # a stage that is shorter than the delay lasts until the signal has come
            self.current = before

    def send(self) -> None:
        RECORD.write_text(self.current)
        for _ in range(FAULT.get("signals", 1)):
            os.kill(os.getpid(), signal.SIGTERM)
            while is_pending(signal.SIGTERM):  # a second one would be none
                time.sleep(0.005)

    def around(self, owner: type, method: str, stage: str) -> None:
        """Let a method be a stage."""
        plain = getattr(owner, method)

        def staged(*args: Any, **kwargs: Any) -> Any:
            with self.within(stage):
                return plain(*args, **kwargs)

        setattr(owner, method, staged)


def is_pending(number: int) -> bool:
    """Return whether a signal to this process is not delivered yet."""
    status = Path("/proc/self/status").read_text()
    return bool(int(status.split("ShdPnd:")[1].split()[0], 16) >> (number - 1) & 1)


def refuse_folders(first: int, folder: Path) -> None:
    """Let no folder of the run be made, from a call on."""
    plain, calls = os.mkdir, 0

    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal calls
        if folder in (Path(path).absolute(), *Path(path).absolute().parents):
            calls += 1
            if calls >= first:
                RECORD.write_text(f"call {calls}: {Path(path).name}")
                raise PermissionError(13, "denied by the test", str(path))
        plain(path, *args, **kwargs)

    os.mkdir = mkdir


def wait_with_folder(shared: Path) -> None:
    """Make a folder that both ranks make only after the other one has failed to, since it may be there already."""
    plain = os.mkdir

    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        while Path(path).absolute() == shared and not RECORD.exists():
            time.sleep(0.01)
        if Path(path).absolute() == shared:
            time.sleep(1)  # after it has failed, the other rank looks whether the folder is there
        plain(path, *args, **kwargs)

    os.mkdir = mkdir


if __name__ == "__main__":
    stages = Stages()
    timed = Meter.timed

    @contextmanager
    def staged(meter: Any, phase: str) -> Iterator[None]:
        with stages.within(phase), timed(meter, phase):
            yield

    Meter.timed = staged  # type: ignore[method-assign]
    stages.around(Saver, "after", "save")
    stages.around(Saver, "end", "save")
    stages.around(Validator, "validate", "validate")
    if HERE and "mkdir" in FAULT:
        refuse_folders(FAULT["mkdir"], Path.cwd() / "out")
    elif FAULT.get("mkdir") and FAULT["rank"] == 1:
        wait_with_folder(Path.cwd() / "out" / "ranks")
    sys.exit(main())

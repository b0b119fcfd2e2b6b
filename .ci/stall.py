"""Stop the processes of pytest at random, each for 0.6 s: `python .ci/stall.py [--seed N] COMMAND...`.

A test that takes a pause of its own process for a failure of what it tests does not belong in the gate. Only pytest's
own processes are stopped, workers of xdist included: what tests start is theirs. The exit status is the command's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PAUSE_SECONDS = 0.6
INTERVAL_SECONDS = (1.0, 6.0)


def descendants(root: int) -> Iterator[tuple[int, str]]:
    """Yield the id and command line of a process and of every process below it."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    waiting = [root]
    while waiting:
        process = waiting.pop()
        waiting += children.get(process, [])
        with contextlib.suppress(OSError):
            yield process, Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    print(f"stall.py: seed {options.seed}", file=sys.stderr)
    draw, stops = random.Random(options.seed), 0
    command = subprocess.Popen(options.command)
    while command.poll() is None:
        time.sleep(draw.uniform(*INTERVAL_SECONDS))
        testing = [pid for pid, line in descendants(command.pid) if "pytest" in line or "exec(eval(sys.stdin" in line]
        if not testing:
            continue
        stopped = draw.choice(testing)
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGSTOP)
            time.sleep(PAUSE_SECONDS)
            stops += 1
            os.kill(stopped, signal.SIGCONT)
    print(f"stall.py: {stops} stops of {PAUSE_SECONDS} s", file=sys.stderr)
    return command.returncode


if __name__ == "__main__":
    sys.exit(main())

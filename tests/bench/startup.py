"""How long a command takes until something happens: `python -m tests.bench.startup [--against CHECKOUT] [--rounds N]`.

The quickstart until its first step is logged, `fit --help` and `--help`: seconds of the clock, and CPU seconds of the
whole tree of processes, on one thread. With another checkout of rlkit the two alternate, and ratios are medians of the
rounds'. Each checkout keeps its compiled modules in a folder of its own, and is run once before anything is measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.bench.step import ROOT, cpu_seconds

COMMANDS = {
    "first step": ["fit", "--recipe", "quickstart", "--validation=null", "--train.steps=2", "--save.every=0"],
    "fit --help": ["fit", "--help"],
    "--help": ["--help"],
}
LOOK_SECONDS = 0.005


class Taken(NamedTuple):
    """Seconds of the clock and of the CPUs."""

    seconds: float
    cpu: float


def measure(checkout: Path, name: str, folder: Path) -> Taken:
    """Run a command from a checkout of rlkit."""
    out = Path(tempfile.mkdtemp(dir=folder)) / "run"
    more = [f"--out={out}"] if name == "first step" else []
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(checkout),
        "PYTHONPYCACHEPREFIX": str(folder / checkout.name),
    }  # fmt: skip
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start, before = time.monotonic(), os.times()
    process = subprocess.Popen(
        (sys.executable, "-W", "ignore", "-m", "rlkit", *COMMANDS[name], *more),
        cwd=checkout, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    found = None
    while more and found is None and process.poll() is None:
        if (out / "metrics.jsonl").exists():
            found = Taken(time.monotonic() - start, cpu_seconds(process.pid))
        time.sleep(LOOK_SECONDS)
    if process.wait():
        raise SystemExit(f"{name} failed in {checkout}")
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return found or Taken(time.monotonic() - start, cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout of rlkit")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    sides = [ROOT] if given.against is None else [given.against.resolve(), ROOT]
    with tempfile.TemporaryDirectory() as folder:
        for name in COMMANDS:
            for side in sides:
                measure(side, name, Path(folder))
            rounds = [[measure(side, name, Path(folder)) for side in sides] for _ in range(given.rounds)]
            cells = []
            for i, side in enumerate(sides):
                seconds, cpu = (statistics.median(r[i][what] for r in rounds) for what in (0, 1))
                cells.append(f"{'here' if side == ROOT else side.name} {seconds:.2f} s, CPU {cpu:.2f} s")
            if len(sides) == 2:
                clock, cpu = (statistics.median(r[1][what] / r[0][what] for r in rounds) for what in (0, 1))
                cells.append(f"ratio {clock:.2f}, CPU {cpu:.2f}")
            print(f"{name:10}", " | ".join(cells), flush=True)


if __name__ == "__main__":
    main()

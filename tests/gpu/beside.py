"""SGLang on the trainer's GPU for some steps, with memory measured in each phase, and a server that is killed.

`python -m tests.gpu.beside MODEL [--steps 20]` trains MODEL with `release_memory`. A thread reads the memory that all
processes have on the GPU; its peaks are those of sampling and of learning. In the middle the
server is killed while the trainer learns. The last line sums up, or says what is wrong. Exit status: 0 ok, 1 wrong.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlkit.interfaces.callback import Callback, RolloutsEnd, RunStart, StepEnd, TrainingBatch
from rlkit.run.preflight.memory import rss_mb
from tests.gpu.bench import Work, rlkit_recipe

INTERVAL = 0.02
"""Seconds between two readings of the memory."""
SETTLED = 3
"""The step from which memory must not grow: those before compile and capture."""
GROWTH = 0.5
"""GiB by which later peaks may be larger, for completions of other lengths."""

Peaks = Mapping[str, Sequence[float]]


def used_gib() -> float:
    """Return the memory that all processes use on the GPU, or without one this process on the host, in GiB."""
    if not torch.cuda.is_available():
        return rss_mb() / 1024
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def kill_server() -> None:
    """Kill the server of SGLang that a supervisor of this process has started."""
    import psutil  # type: ignore[import-untyped]  # which SGLang requires

    processes = [server for supervisor in psutil.Process().children() for server in supervisor.children()]
    [server] = [process for process in processes if "sglang.launch_server" in process.cmdline()]
    server.kill()


class Watch(Callback):
    """Notes the largest memory of each phase and step, and kills the server once.

    Args:
        killed_in: The step in which the server is killed, between its rollouts and the optimizer's step; 0 for none.
    """

    def __init__(self, killed_in: int = 0) -> None:
        self.killed_in = killed_in
        self.peaks: dict[str, list[float]] = defaultdict(list)
        self.rows: list[dict[str, float]] = []
        self._peak, self._lock, self._ended = 0.0, threading.Lock(), threading.Event()

    def on_run_start(self, event: RunStart) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while not self._ended.wait(INTERVAL):
            used = used_gib()
            with self._lock:
                self._peak = max(self._peak, used)

    def _end(self, phase: str) -> None:
        with self._lock:
            self.peaks[phase].append(max(self._peak, used_gib()))
            self._peak = 0.0

    def on_rollouts(self, event: RolloutsEnd) -> None:
        self._end("sampling")

    def on_batch(self, event: TrainingBatch) -> None:
        if len(self.rows) + 1 == self.killed_in:
            kill_server()

    def on_step_end(self, event: StepEnd) -> None:
        self._end("learning")
        self.rows.append(dict(event.metrics))

    def close(self) -> None:
        self._ended.set()


def wrong(rows: Sequence[Mapping[str, float]], peaks: Peaks, restarts: int) -> list[str]:
    """Return what is wrong with a run's metrics and with its largest memory by phase, in GiB."""
    problems = [f"step {i}: rollout/failed is {row['rollout/failed']:g}" for i, row in enumerate(rows, 1)
                if row.get("rollout/failed", 0) > 0]  # fmt: skip
    problems += [f"step {i}: mismatch/mean is {row['mismatch/mean']:g}" for i, row in enumerate(rows, 1)
                 if not row["mismatch/mean"] <= 0.05]  # fmt: skip
    counted = rows[-1].get("engine/restarts", 0)
    if counted != restarts:
        problems.append(f"engine/restarts is {counted:g}, expected {restarts}")
    for phase, values in peaks.items():
        settled, largest = values[SETTLED - 1], max(values[SETTLED:], default=0.0)
        if largest > settled + GROWTH:
            problems.append(f"memory in {phase} grows from {settled:.1f} GiB in step {SETTLED} to {largest:.1f}")
    return problems


def summary(rows: Sequence[Mapping[str, float]], peaks: Peaks, weights: float) -> str:
    """Return a run's medians and peaks in a line.

    Args:
        rows: The steps' metrics.
        peaks: The largest memory of each step by phase, in GiB.
        weights: Size of the weights that a sync sends, in GiB.
    """
    sample, update = (statistics.median(row[name] for row in rows[1:]) for name in ("time/sample", "time/update"))
    sync = statistics.median(row.get("engine/sync_seconds", row["time/sync"]) for row in rows[1:])
    memory = ", ".join(f"{phase} {values[SETTLED - 1]:.1f} to {values[-1]:.1f}" for phase, values in peaks.items())
    return (
        f"{len(rows)} steps: sample {sample:.2f}, update {update:.2f}, sync {sync:.3f} s "
        f"({weights / sync:.1f} GiB/s); GiB on the GPU from step {SETTLED} to "
        f"the last: {memory}; mismatch {max(row['mismatch/mean'] for row in rows):.1e}"
    )


def main(argv: list[str]) -> int:
    """Train, judge the run, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--alone", action="store_true", help="sample with TorchEngine, and kill nothing")
    given = parser.parse_args(argv)
    watch = Watch(killed_in=0 if given.alone else given.steps // 2)
    work = Work(given.model, given.prompts, given.length, given.steps)
    recipe = rlkit_recipe(work, watch, None if given.alone else beside())
    recipe.train = replace(recipe.train, offload_during_rollout=not given.alone)
    from rlkit import fit

    with tempfile.TemporaryDirectory() as folder:
        fit(recipe, out=Path(folder) / "run", quiet=True)
    watch.close()
    problems = wrong(watch.rows, watch.peaks, restarts=int(not given.alone))
    if len(watch.rows) != given.steps:
        problems.append(f"{len(watch.rows)} steps, expected {given.steps}")
    stored = sum(file.stat().st_size for file in given.model.glob("*.safetensors"))
    print("; ".join(problems) or summary(watch.rows, watch.peaks, stored / 2**30 / 2))  # stored in 32 bits, sent in 16
    return int(bool(problems))


def beside() -> Any:
    """Return the engine on the trainer's GPU."""
    from rlkit_servers.sglang.engine import SGLangEngine
    from rlkit_servers.sglang.launch import Launch

    return SGLangEngine(Launch(release_memory=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What steps gain that do not wait for the longest answers: `rollout.max_staleness`, with log-normal lengths.

`python -m tests.bench.ahead [STEPS]` trains in turns of processes, synchronously and with S = 1, 2 and 4, and prints
trajectories a CPU second and a wall second, steps 3 to the last. An answer ends after a length that its key determines:
median 32 tokens, one of a hundred 8 times as long, at most 512. The synchronous trainer needs no correction and has
none; the others have `train.old_logps: loglinear`, which needs no pass of its own either.

The model has 10M parameters, and a step 2 prompts x 4 samples. With so few rows a decode step of this model takes about
as long for one row as for all, since the weights have to be read; on a GPU that holds for hundreds of rows. On one
thread CPU seconds count, which other processes lengthen least.

`python -m tests.bench.ahead beside [STEPS]` does the same with HttpEngine on one core and the trainer on another, for
the tiny model and quickstart's 32 x 8 samples, of which sampling and learning take about as long: there wall seconds
count, since CPU seconds do not say what waits for what. It also prints the shares of a step in which trainer and engine
were idle.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "rlkit-engine-http" / "src"))
from rlkit_engine_http import HttpEngine
from rlkit_servers.server import InferenceServer

from rlkit import Recipe, fit
from rlkit.engines import TorchEngine
from rlkit.interfaces.callback import Callback, StepEnd
from rlkit.interfaces.engine import RolloutEngine
from rlkit.recipe import Rollout, Train
from rlkit.types import Completion, Request, Sampling
from tests.bench.work import questions, save_model

MEDIAN, SIGMA, LIMIT = 32, math.log(8) / 2.326, 512
ROWS = {"colocated": (2, 4), "beside": (32, 8)}
"""Prompts and samples of a step."""
STALENESS = {"colocated": (0, 1, 2, 4), "beside": (0, 1, 2)}
PHASES = ("sample", "logps", "score", "update", "sync")


class LogNormal(RolloutEngine):
    """Ends each answer after a length of its own."""

    def bind(self, runtime: Any) -> None:
        super().bind(runtime)
        self._stop_ids: frozenset[int] = frozenset()

    async def generate(self, request: Request) -> Completion:
        length = round(MEDIAN * math.exp(SIGMA * random.Random(request.key.hash()).gauss()))
        left = min(max(length, 1), LIMIT) - (LIMIT - request.sampling.max_tokens)
        return await super().generate(replace(request, sampling=request.sampling.within(max(left, 1))))


class Colocated(LogNormal, TorchEngine):
    """On the trainer's core."""


class Beside(LogNormal, HttpEngine):
    """On the last core, while the trainer has the first one."""

    def start(self, rank: int) -> list[InferenceServer]:
        here = os.sched_getaffinity(0)
        os.sched_setaffinity(0, CORES[-1:])
        try:
            return super().start(rank)
        finally:
            os.sched_setaffinity(0, here)


CORES = sorted(os.sched_getaffinity(0))


class Clock(Callback):
    """Notes the times of steps."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def on_step_end(self, event: StepEnd) -> None:
        """Note both clocks."""
        self.times.append((time.process_time(), time.perf_counter()))


async def reward(text: str, answer: str) -> float:
    """Return 0 or 1, whatever is right."""
    return float(sum(map(ord, text)) % 2)


def child(kind: str, staleness: int, steps: int) -> None:
    """Train; print trajectories a CPU second and a wall second, staleness and idle shares."""
    clock = Clock()
    prompts, samples = ROWS[kind]
    sums = [(f"{a} + {b} = ?", str(a + b)) for a in range(40) for b in range(40)]
    texts = questions(prompts * steps, 3) if kind == "colocated" else sums
    rows = [{"prompt": text, "answer": answer} for text, answer in texts]
    sampling, engine = Sampling(max_tokens=LIMIT), Colocated() if kind == "colocated" else Beside()
    if kind == "beside":
        os.sched_setaffinity(0, CORES[:1])
    with tempfile.TemporaryDirectory() as folder:
        found = fit(
            Recipe(
                model="tiny" if kind == "beside" else str(save_model(Path(folder) / "model", "10m")),
                task=rows, reward=reward, validation=None, callbacks=[clock],
                rollout=Rollout(engine, samples, sampling, max_staleness=staleness),
                train=Train(
                    steps=steps, prompts_per_step=prompts, lr=1e-6, old_logps="loglinear" if staleness else "recompute"
                ),
                log={"rollouts": {"every": 0}}, save={"every": 0},
            ),
            out=f"{folder}/run", quiet=True,
        )  # fmt: skip
    (cpu, wall), (last_cpu, last_wall) = clock.times[1], clock.times[-1]
    done = prompts * samples * (len(clock.times) - 2)
    metrics = found.metrics[2:]
    metrics = {
        "cpu": done / (last_cpu - cpu),
        "wall": done / (last_wall - wall),
        "age": statistics.fmean(line.get("staleness/mean", 0.0) for line in metrics),
        "trainer idle": statistics.fmean(line["time/trainer_idle_share"] for line in metrics),
        "engine idle": statistics.fmean(engine_idle(line, kind == "beside" and staleness > 0) for line in metrics),
        **{phase: statistics.fmean(line[f"time/{phase}"] for line in metrics) for phase in PHASES},
    }
    print(json.dumps(metrics))


def engine_idle(line: dict[str, float], whole: bool) -> float:
    """Return the share of a step in which the engine had nothing to do; the metric is `whole` or one of sampling."""
    if whole:
        return line["time/engine_idle_share"]
    seconds = sum(line[f"time/{phase}"] for phase in PHASES)
    return 1 - (1 - line["time/engine_idle_share"]) * line["time/sample"] / seconds


def main(kind: str, steps: int, rounds: int = 3) -> None:
    """Alternate the cases in processes of one thread; print medians."""
    results: dict[int, list[dict[str, float]]] = {staleness: [] for staleness in STALENESS[kind]}
    for _ in range(rounds):
        for staleness, found in results.items():
            words = (sys.executable, "-m", "tests.bench.ahead", "--child", kind, str(staleness), str(steps))
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    for staleness, found in results.items():
        medians = {name: statistics.median(one[name] for one in found) for name in found[0]}
        rates = []
        for clock in ("wall",) if kind == "beside" else ("cpu", "wall"):
            ratio = statistics.median(a[clock] / b[clock] for a, b in zip(found, results[0], strict=True))
            rates.append(f"{medians[clock]:.1f} trajectories a {clock} second ({ratio:.2f})")
        phases = ", ".join(f"{phase} {medians[phase]:.2f}" for phase in PHASES)
        print(f"S = {staleness}: {', '.join(rates)}, mean age {medians['age']:.2f}, idle: trainer "
              f"{medians['trainer idle']:.0%}, engine {medians['engine idle']:.0%}; seconds: {phases}")  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        words = sys.argv[1:]
        kind = words.pop(0) if words[:1] == ["beside"] else "colocated"
        main(kind, int(words[0]) if words else {"colocated": 32, "beside": 10}[kind])

"""What steps gain that do not wait for the longest answers: `rollout.max_staleness`, with log-normal lengths.

`python -m tests.bench.ahead [STEPS]` trains a model of 1M parameters in turns of processes, synchronously and with
S = 1 and 2, and prints trajectories a CPU second and a wall second, steps 3 to the last. An answer ends after a length
that its key determines: median 32 tokens, one of a hundred 8 times as long, at most 512.
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
from typing import Any

from rlkit import Recipe, fit
from rlkit.engines import TorchEngine
from rlkit.interfaces.callback import Callback, StepEnd
from rlkit.sections import Rollout, Train
from rlkit.types import Completion, Request, Sampling

MEDIAN, SIGMA, LIMIT = 32, math.log(8) / 2.326, 512
PROMPTS, SAMPLES = 16, 8


class LogNormal(TorchEngine):
    """Ends each answer after a length of its own."""

    def bind(self, runtime: Any) -> None:
        super().bind(runtime)
        self._stop_ids = frozenset()

    async def generate(self, request: Request) -> Completion:
        length = round(MEDIAN * math.exp(SIGMA * random.Random(request.key.hash()).gauss()))
        left = min(max(length, 1), LIMIT) - (LIMIT - request.sampling.max_tokens)
        return await super().generate(replace(request, sampling=request.sampling.within(left)))


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


def child(staleness: int, steps: int) -> None:
    """Train; print trajectories a CPU second and a wall second, and what staleness there was."""
    clock = Clock()
    rows = [{"prompt": f"{a} + {b} = ?", "answer": str(a + b)} for a in range(40) for b in range(40)]
    sampling = Sampling(max_tokens=LIMIT)
    with tempfile.TemporaryDirectory() as folder:
        found = fit(
            Recipe(
                model="tiny", task=rows, reward=reward, validation=None, callbacks=[clock],
                rollout=Rollout(LogNormal(), SAMPLES, sampling, max_staleness=staleness),
                train=Train(steps=steps, prompts_per_step=PROMPTS), correction={"high": 2.0},
                log={"rollouts": {"every": 0}},
            ),
            out=f"{folder}/run", quiet=True,
        )  # fmt: skip
    (cpu, wall), (last_cpu, last_wall) = clock.times[1], clock.times[-1]
    done = PROMPTS * SAMPLES * (len(clock.times) - 2)
    ages = [line.get("staleness/mean", 0.0) for line in found.metrics[2:]]
    print(
        json.dumps({"cpu": done / (last_cpu - cpu), "wall": done / (last_wall - wall), "age": statistics.fmean(ages)})
    )


def main() -> None:
    """Alternate the cases in processes of one thread; print medians."""
    steps, rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 16, 3
    results: dict[int, list[dict[str, float]]] = {0: [], 1: [], 2: []}
    for _ in range(rounds):
        for staleness, found in results.items():
            words = (sys.executable, "-m", "tests.bench.ahead", "--child", str(staleness), str(steps))
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    for staleness, found in results.items():
        medians = {name: statistics.median(one[name] for one in found) for name in found[0]}
        ratios = [
            statistics.median(a[n] / b[n] for a, b in zip(found, results[0], strict=True)) for n in ("cpu", "wall")
        ]
        print(f"S = {staleness}: {medians['cpu']:.0f} trajectories a CPU second ({ratios[0]:.2f}), "
              f"{medians['wall']:.0f} a second ({ratios[1]:.2f}), mean age {medians['age']:.2f}")  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(int(sys.argv[2]), int(sys.argv[3]))
    else:
        main()

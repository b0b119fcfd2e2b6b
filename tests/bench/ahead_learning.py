"""What policies learn from older answers: `rollout.max_staleness` S, with and without a correction.

`nice python -m tests.bench.ahead_learning RESULTS.jsonl` trains quickstart (60 steps) and quick_tool (20 steps) with
seeds 0 to 2, each run in a process of one thread, and prints the accuracy of greedy and of sampled answers after
training: mean and spread over the seeds. What is in the file already is not run again.

`stream` is the trainer of `rollout.max_staleness: S` with `lead: S` and an engine that holds all groups at once,
without which those that wait in its queue are young. `exact` trains synchronously on answers that are all S steps old:
its engine keeps the weights of the last S steps. TIS is `correction: {high: 2.0}`, `clip` the loss's own clipped ratio
to the policy that sampled (`train.old_logps: rollout`). Without one there is a `rejection` that never rejects, since
its bounds (1e-9, 1e9) lie beyond those of any ratio (log-ratios are clamped to +-20), as rlkit refuses to run ahead
with none. Interrupted, it goes on where it was; the table then has the runs that are known.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import yaml

from rlkit import Recipe, fit
from rlkit.engines import TorchEngine
from rlkit.interfaces.engine import Capability
from rlkit.interfaces.runtime import Runtime, WeightStream

STEPS = {"quickstart": 60, "quick_tool": 20}
CORRECTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "TIS": {"correction": {"high": 2.0}},
    "clip": {"train": {"old_logps": "rollout"}},
    "none": {"rejection": {"low": 1e-9, "high": 1e9}},
}
METRICS = ("accuracy", "sampled_accuracy")


class _WithCopy:
    """A runtime with a copy of its policy."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self.policy = runtime, deepcopy(runtime.policy)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)


class Lagging(TorchEngine):
    """Samples with the weights of `lag` steps ago; after the last step, with the last ones."""

    capabilities = TorchEngine.capabilities & ~Capability.READS_POLICY

    def __init__(self, lag: int, last: int) -> None:
        super().__init__(max_rows=2048)
        self.lag, self.last = lag, last
        self._kept: dict[int, dict[str, torch.Tensor]] = {}

    def bind(self, runtime: Runtime) -> None:
        self._copy = _WithCopy(runtime)
        super().bind(self._copy)

    async def sync(self, stream: WeightStream, version: int) -> None:
        self._kept[version] = {name: x.clone() for bucket in stream.buckets() for name, x in bucket}
        used = version if version == self.last else max(0, version - self.lag)
        with torch.no_grad():
            for name, parameter in self._copy.policy.named_parameters():
                parameter.copy_(self._kept[used][name])
        await super().sync(stream, used)


def child(recipe: str, mode: str, lag: int, correction: str, seed: int) -> None:
    """Train; print the accuracy afterwards and the mean age of what was trained on in the second half."""
    sections = yaml.safe_load((Path(__file__).parents[2] / "recipes" / f"{recipe}.yaml").read_text())
    steps = STEPS[recipe]
    sections["train"] |= {"steps": steps, "seed": seed}
    sections["validation"] |= {"before": False, "samples": 4}
    sections["log"] = {"rollouts": {"every": 0}}
    if mode == "exact":
        sections["rollout"]["engine"] = Lagging(lag, steps)
    else:
        sections["rollout"] |= {"max_staleness": lag, "lead": lag, "engine": TorchEngine(max_rows=2048)}
    if lag:
        for name, options in CORRECTIONS[correction].items():
            sections[name] = sections.get(name, {}) | options
    with tempfile.TemporaryDirectory() as folder:
        found = fit(Recipe(**sections), out=f"{folder}/run", quiet=True)
    ages = [row.get("staleness/mean", float(lag)) for row in found.metrics[steps // 2 :]]
    metrics = found.validation["after"] or {}
    print(json.dumps({"age": statistics.fmean(ages)} | {name: metrics[name] for name in METRICS}))


def cases() -> list[tuple[str, str, int, str, int]]:
    """Return all runs, a seed after the other; S = 0 needs no correction."""
    lags = [("stream", 0, "none"), *((m, s, c) for m in ("stream", "exact") for s in (1, 2, 4) for c in CORRECTIONS)]
    return [(recipe, *lag, seed) for seed in range(3) for recipe in STEPS for lag in lags]


def main(path: Path) -> None:
    """Run what is not in the file yet; print the table, also when interrupted."""
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {tuple(row["case"]): row for row in known}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        for case in cases():
            if case not in done:
                words = (sys.executable, "-m", "tests.bench.ahead_learning", "--child", *map(str, case))
                ran = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                done[case] = {"case": case, **json.loads(ran.stdout.splitlines()[-1])}
                with path.open("a") as file:
                    file.write(json.dumps(done[case]) + "\n")
    finally:
        show(done)


def show(done: dict[tuple[Any, ...], dict[str, Any]]) -> None:
    """Print the means and the ranges over the seeds that are known."""
    print("| recipe | S | ages | correction | mean age | greedy | sampled | seeds |\n|---|---|---|---|---|---|---|---|")
    for recipe, mode, lag, correction in dict.fromkeys(case[:4] for case in cases()):
        rows = [row for case, row in done.items() if case[:4] == (recipe, mode, lag, correction)]
        if rows:
            age = statistics.fmean(row["age"] for row in rows)
            columns = [[row[name] for row in rows] for name in METRICS]
            texts = [f"{statistics.fmean(xs):.3f} ({min(xs):.3f} to {max(xs):.3f})" for xs in columns]
            print(f"| {recipe} | {lag} | {mode} | {correction} | {age:.1f} | {' | '.join(texts)} | {len(rows)} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5], int(sys.argv[6]))
    else:
        main(Path(sys.argv[1]))

"""How costs grow: `python -m tests.bench.growth [AXIS ...]`.

One thing grows fourfold from point to point and all else stays. Each axis is a process of its own on one thread, whose
first point runs once to warm up. Printed are the CPU seconds of this process by what grew, the exponent of the whole
axis (the slope of a line through the logarithms), and the exponent from the last point but one to the last, in which
constant costs hide least. 1 is linear growth.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlkit.interfaces.callback import Callback, RunStart, StepEnd, ValidationEnd
from tests.bench.step import reward

ENDLESS = 1e-9
"""The probability that an answer ends with the next token where lengths shall be equal."""


class Clock(Callback):
    """Notes the process's CPU seconds at the start of a run and after each validation and step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_run_start(self, event: RunStart) -> None:
        self.seconds.append(time.process_time())

    def on_step_end(self, event: StepEnd) -> None:
        self.seconds.append(time.process_time())

    def on_validation(self, event: ValidationEnd) -> None:
        self.seconds.append(time.process_time())


def train(folder: Path, recipe: str = "quickstart", steps: int = 3, **sections: Any) -> Clock:
    """Train a shipped recipe with other options."""
    from rlkit import fit

    clock = Clock()
    sections["train"] = {"steps": steps, "prompts_per_step": 4, **sections.get("train", {})}
    options = {"validation": None, "save": {"every": 0}, "callbacks": [clock], **sections}
    fit(recipe, out=tempfile.mkdtemp(dir=folder) + "/run", quiet=True, **options)
    return clock


def later_steps(clock: Clock) -> float:
    """Return the seconds of a run's steps after the first."""
    return clock.seconds[-1] - clock.seconds[1]


def rollouts(size: int, folder: Path) -> float:
    """Measure steps by their rollouts, in groups of 8."""
    return later_steps(train(folder, train={"prompts_per_step": size // 8}))


def length(size: int, folder: Path) -> float:
    """Measure steps of a 1M model by the tokens of each of 32 completions."""
    model = _model(folder, "1m", 512)
    sampling = {"group_size": 8, "sampling": {"max_tokens": size}}
    return later_steps(train(folder, model=str(model), reward=reward, rollout=sampling))


def vocabulary(size: int, folder: Path) -> float:
    """Measure steps of a 1M model, its embeddings apart, by its vocabulary."""
    return later_steps(train(folder, model=str(_model(folder, "1m", size)), reward=reward))


def steps(size: int, folder: Path) -> float:
    """Measure a run after its first step by the steps that follow."""
    return later_steps(train(folder, steps=size + 1))


def validation(size: int, folder: Path) -> float:
    """Measure a validation before training by its rows, each answered twice."""
    task = {"class_path": "Arithmetic", "init_args": {"validation_size": size}}
    clock = train(folder, steps=1, task=task, validation={"before": True, "after": False})
    return clock.seconds[1] - clock.seconds[0]


def rewards(size: int, folder: Path) -> float:
    """Measure steps by the rewards that score each of 32 completions."""
    parts = {f"reward_{i}": "ExactReward" for i in range(size)}
    return later_steps(train(folder, reward={"class_path": "Composite", "init_args": {"rewards": parts}}))


def tools(size: int, folder: Path) -> float:
    """Measure steps of quick_tool by the tools that a prompt offers."""
    offered = {f"calculator_{i}": "Calculator" for i in range(size - 1)}  # beside the recipe's own
    return later_steps(train(folder, "quick_tool", tools=offered))


def turns(size: int, folder: Path) -> float:
    """Measure TorchEngine by the turns of 32 conversations with a 1M model."""
    from transformers import AutoModelForCausalLM

    from tests.bench.generate import engine_of
    from tests.bench.turns import CONVERSATIONS, converse

    engine = engine_of(AutoModelForCausalLM.from_pretrained(_model(folder, "1m", 512)).eval(), -1)

    async def all_of_them() -> None:
        await asyncio.gather(*(converse(engine, number, 0, size) for number in range(CONVERSATIONS)))

    start = time.process_time()
    with engine.on_device():
        asyncio.run(all_of_them())
    return time.process_time() - start


def rows(size: int, folder: Path) -> float:
    """Measure the first start with JSON lines, a hundredth of them held out, by their number."""
    from rlkit.tasks import Jsonl

    path, draw = folder / f"{size}.jsonl", random.Random(0)
    with path.open("w", encoding="utf-8") as lines:
        for i in range(size):
            lines.write(f'{{"prompt": "{draw.randrange(10**6)} + {i} =", "answer": "{draw.randrange(10**6)}"}}\n')
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(dir=folder)
    start = time.process_time()
    task = Jsonl(str(path), validation_split=0.01)
    task.rows("train"), task.rows("validation")
    return time.process_time() - start


def sessions(size: int, folder: Path) -> float:
    """Measure the gateway, its client included, by sessions of three turns at once."""
    from rlkit_authors.models import build_tokenizer

    from tests.bench.gateway import Instant, play

    return asyncio.run(play(Instant(), build_tokenizer(), True, 0, sessions=size))[0]


class Axis(NamedTuple):
    """What is measured at which sizes, from the smallest to the largest."""

    measure: Callable[[int, Path], float]
    sizes: tuple[int, ...]


AXES = {
    "rollouts": Axis(rollouts, (64, 256, 1024)),
    "length": Axis(length, (32, 128, 512)),
    "turns": Axis(turns, (2, 8, 32)),
    "rows": Axis(rows, (20_000, 80_000, 320_000)),
    "vocabulary": Axis(vocabulary, (4096, 16_384, 65_536)),
    "validation": Axis(validation, (50, 200, 800)),
    "steps": Axis(steps, (4, 16, 64)),
    "sessions": Axis(sessions, (16, 64, 256)),
    "rewards": Axis(rewards, (4, 16, 64)),
    "tools": Axis(tools, (2, 8, 32)),
}


def exponent(points: list[tuple[int, float]]) -> float:
    """Return the slope of the least-squares line through the logarithms of points."""
    sizes, seconds = ([math.log(value) for value in column] for column in zip(*points, strict=True))
    middle, mean = sum(sizes) / len(sizes), sum(seconds) / len(seconds)
    rise = sum((x - middle) * (y - mean) for x, y in zip(sizes, seconds, strict=True))
    return rise / sum((x - middle) ** 2 for x in sizes)


def measure(name: str) -> None:
    """Print a line of the table."""
    torch.set_num_threads(1)
    axis = AXES[name]
    with tempfile.TemporaryDirectory() as folder:
        axis.measure(axis.sizes[0], Path(folder))
        points = [(size, axis.measure(size, Path(folder))) for size in axis.sizes]
    cells = ", ".join(f"{size:,}: {seconds:.2f} s" for size, seconds in points)
    load = os.getloadavg()[0]
    print(f"| {name} | {cells} | {exponent(points):.2f} | {exponent(points[-2:]):.2f} | {load:.0f} |", flush=True)


def _model(folder: Path, size: str, words: int) -> Path:
    """Return a model whose answers do not end, saved once."""
    from tests.bench.work import save_model

    path = folder / f"{size}-{words}"
    return path if path.exists() else save_model(path, size, words, ENDLESS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axes", nargs="*", default=list(AXES), metavar="AXIS", help=", ".join(AXES))
    parser.add_argument("--here", action="store_true", help="measure in this process")
    given = parser.parse_args()
    if not given.here:
        print("| what grows | CPU seconds | exponent | at the end | load |\n|---|---|---|---|---|", flush=True)
    for name in given.axes:
        if given.here:
            measure(name)
        else:
            command = (sys.executable, "-W", "ignore", "-m", "tests.bench.growth", name, "--here")
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})


if __name__ == "__main__":
    main()

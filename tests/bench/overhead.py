"""What of a step is rlkit's own overhead: `python -m tests.bench.overhead [quickstart] [10m/64]`.

A step's CPU seconds are those of the whole tree of processes. What is not overhead is measured where it happens, by the
clock of the thread that does it: forward passes of models, backward passes, clipping and steps of the optimizer in the
trainer's thread, and all that the engine's own thread does, which is to prefill, to decode and to choose tokens. The
rest is overhead: conversations, templates, tokenisation, rewards and the processes in which they run, batches, metrics,
what is written. The first steps are left out; one thread of torch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench.step import PROMPTS, ROOT, SAMPLES, cpu_seconds, reward

WARM, GOALS = 3, {"quickstart": 0.08, "10m/64": 0.01}
"""Steps that are left out, and what share of a step the overhead may be."""

spent: dict[str, float] = defaultdict(float)
"""CPU seconds of the trainer's thread by what it did with tensors."""


def counted(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that adds the CPU seconds of its thread to `spent`, those of calls in it once."""

    def call(*args: Any, **more: Any) -> Any:
        before, start = sum(spent.values()), time.thread_time()
        try:
            return work(*args, **more)
        finally:
            inner = sum(spent.values()) - before
            spent[name] += time.thread_time() - start - inner

    return call


def instrument() -> None:
    """Measure what the trainer's thread does with tensors."""
    import torch

    from rlkit.models.actor import Actor
    from rlkit.train.models import TrainableModule

    for owner, method, name in (
        (Actor, "forward", "forward"),
        (TrainableModule, "backward", "backward"),
        (TrainableModule, "clip_gradients", "optimizer"),
    ):
        setattr(owner, method, counted(name, getattr(owner, method)))
    for kind in (torch.optim.AdamW, torch.optim.Adam):
        kind.step = counted("optimizer", kind.step)  # type: ignore[method-assign]


def threads() -> dict[str, float]:
    """Return the CPU seconds of this process's threads by the beginnings of their names."""
    found: Counter[str] = Counter()
    for thread in threading.enumerate():
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        found[thread.name.rpartition("_")[0] or thread.name] += time.clock_gettime(clock)  # type: ignore[assignment]
    return dict(found)


def snapshot() -> dict[str, float]:
    """Return CPU seconds up to now."""
    children = cpu_seconds(os.getpid()) - _own()
    return threads() | {f"tensors: {name}": x for name, x in spent.items()} | {
        "all": time.process_time() + children, "worker processes": children,
    }  # fmt: skip


def _own() -> float:
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def measure(row: str, steps: int, model: Path) -> None:
    """Train, and print the table."""
    from rlkit.interfaces.callback import Callback, StepEnd

    instrument()
    snapshots = []

    class Steps(Callback):
        def on_step_end(self, event: StepEnd) -> None:
            if event.step in (WARM, steps):  # a snapshot takes a millisecond
                snapshots.append(snapshot())

    with tempfile.TemporaryDirectory() as folder:
        _fit(row, steps, model, Path(folder) / "run", Steps())
    report(row, *snapshots, steps - WARM)


def _fit(row: str, steps: int, model: Path, out: Path, callback: Any) -> None:
    from rlkit import Recipe, fit
    from rlkit.recipe import Log, Model, Rollout, Save, Train
    from rlkit.rewards import MathReward
    from rlkit.tasks import Arithmetic
    from rlkit.types import Sampling
    from tests.bench.work import questions

    if row == "quickstart":
        work: dict[str, Any] = {"model": Model("tiny"), "task": Arithmetic(), "reward": MathReward()}
        rollout = Rollout(group_size=8, sampling=Sampling(max_tokens=12))
        train = Train(steps=steps, prompts_per_step=32, lr=1e-3, seed=0)
    else:
        task = [{"prompt": q, "answer": a} for q, a in questions(PROMPTS * steps, 3)]
        work = {"model": Model(str(model)), "task": task, "reward": reward, "save": Save(every=0)}
        rollout = Rollout(group_size=SAMPLES, sampling=Sampling(max_tokens=64))
        train = Train(steps=steps, prompts_per_step=PROMPTS, lr=1e-6)
    fit(Recipe(**work, rollout=rollout, train=train, callbacks=[callback], log=Log()), out=out, quiet=True)


def report(row: str, start: dict[str, float], end: dict[str, float], steps: int) -> None:
    """Print what a step takes, and which parts of it are overhead."""
    used = Counter({name: (x - start.get(name, 0.0)) / steps for name, x in end.items()})
    whole = used.pop("all")
    tensors = {name: used.pop(name) for name in [*used] if name.startswith("tensors: ")}
    sampling = used.pop("rlkit-decode")
    used["MainThread"] -= sum(tensors.values())
    overhead = whole - sampling - sum(tensors.values())
    used["other"] = overhead - sum(used.values())
    print(
        f"{row}: {1000 * whole:.0f} ms of CPU a step, overhead {1000 * overhead:.1f} ms = {overhead / whole:.1%}",
        end="",
    )
    print(f" (goal {GOALS[row]:.0%})\n  engine's thread {1000 * sampling:.0f}", end="")
    print("".join(f", {name.partition(' ')[2]} {1000 * x:.0f}" for name, x in tensors.items()), "ms")
    parts = ((name, x) for name, x in used.most_common() if abs(x) >= 0.00005)
    print("  overhead:", ", ".join(f"{name} {1000 * x:.1f}" for name, x in parts), "ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=list(GOALS), metavar="ROW", help=", ".join(GOALS))
    parser.add_argument("--steps", type=int, default=23)
    parser.add_argument("--here", type=Path, help="measure in this process, the models in a folder")
    given = parser.parse_args()
    if given.here is not None:
        for row in given.rows:
            measure(row, given.steps, given.here / "10m")
        return
    from tests.bench.work import save_model

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder) / "10m", "10m")
        for row in given.rows:
            steps = given.steps if row == "quickstart" else min(given.steps, 8)
            here = ("-W", "ignore", "-m", "tests.bench.overhead", row, f"--steps={steps}", f"--here={folder}")
            subprocess.run((sys.executable, *here), check=True, env=environment, cwd=ROOT)


if __name__ == "__main__":
    main()

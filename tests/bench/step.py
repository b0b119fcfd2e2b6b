"""A whole GRPO step of TRL, of a loop by hand and of rlkit: `python -m tests.bench.step [ROW ...]`.

TRL needs the extra `bench`; `minimal.py` is the loop. `--only rlkit-bf16 --only rlkit` compares precisions; `trl-bf16`
has bfloat16 and gradient checkpointing, TRL's defaults. Ratios are those of each side to the last one.

16 prompts of about 100 tokens, 8 samples each, Qwen2 models with random weights, float32, one thread. Each side is a
process of its own that makes one step when asked; they alternate, and what is measured is CPU seconds of the whole
tree of processes. rlkit runs with its defaults, the others with the micro-batch that is best for TRL.

The floor is what the products alone would take, at the rate that this machine has for large ones in the same minutes:
prompts once, a pass to sample, three to learn (two for adapters alone), one for a reference. TRL's step divided by the
floor is the ratio that nothing can exceed in these types on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

ROOT = Path(__file__).parents[2]
PROMPTS, SAMPLES = 16, 8


class Row(NamedTuple):
    """One line of the table, or a point of `scale.py`."""

    size: str
    length: int
    trl_micro_batch: int = 16
    kl: float = 0.0
    lora: bool = False
    goal: float = 0.0
    prompts: int = PROMPTS
    samples: int = SAMPLES


ROWS = {
    "1m/256": Row("1m", 256, goal=4.0),
    "10m/64": Row("10m", 64, goal=2.2),
    "10m/64-kl": Row("10m", 64, kl=0.04, goal=2.3),
    "10m/64-lora": Row("10m", 64, lora=True, goal=2.6),
    "10m/256": Row("10m", 256, goal=3.2),
}
SIDES = ["trl", "trl-bf16", "minimal", "rlkit", "rlkit-bf16"]

Precision = Literal["32-true", "bf16-mixed"]


class Gate:
    """Runs in a side's process: waits for the parent before each step and reports after it."""

    def __init__(self) -> None:
        self.answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # what libraries print is no answer

    def wait(self) -> None:
        if not sys.stdin.readline():
            os._exit(0)

    def report(self, **metrics: float) -> None:
        print(json.dumps(metrics | {"peak": peak()}), file=self.answers, flush=True)


def gated_steps(measures: Callable[[dict[str, float]], dict[str, float]]) -> Any:
    """Return a callback by which rlkit's steps wait for the parent and report `measures` of their metrics."""
    from rlkit.interfaces.callback import Callback, RunStart, StepEnd

    gate = Gate()

    class Turns(Callback):
        budgets = dict.fromkeys(Callback.budgets, 1e6)

        def on_run_start(self, event: RunStart) -> None:
            gate.report(rss=reset_peak())
            gate.wait()

        def on_step_end(self, event: StepEnd) -> None:
            gate.report(**measures(event.metrics))
            gate.wait()

    return Turns()


def reward(completions: Any, **_: Any) -> list[float]:
    """Score by digits and length: something that varies."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [0.2 * any(ch.isdigit() for ch in text) + 0.001 * len(text) for text in texts]


def rlkit_side(row: Row, model: Path, steps: int, precision: Precision, options: dict[str, Any]) -> None:
    """Train with rlkit's defaults."""
    from rlkit import Recipe, fit
    from rlkit.recipe import Fabric, KLLoss, Log, Lora, Model, Rollout, Save, Train
    from rlkit.types import Sampling
    from tests.bench.work import questions

    def measures(metrics: dict[str, float]) -> dict[str, float]:
        times = {k.removeprefix("time/"): v for k, v in metrics.items() if k.startswith("time/")}
        length = metrics["rollout/length"]
        return {"length": length, "prompt": metrics["update/tokens"] / (row.prompts * row.samples) - length, **times}

    turns = gated_steps(measures)
    with tempfile.TemporaryDirectory() as folder:
        fit(
            Recipe(
                model=Model(str(model), lora=Lora(rank=16, alpha=32, targets="all-linear") if row.lora else None),
                task=[{"prompt": q, "answer": a} for q, a in questions(row.prompts * steps, 3)],
                reward=reward,
                rollout=Rollout(group_size=row.samples, sampling=Sampling(max_tokens=row.length)),
                train=Train(steps=steps, prompts_per_step=row.prompts, lr=1e-6, **options),
                kl_loss=KLLoss(coef=row.kl) if row.kl else None,
                fabric=Fabric(precision=precision),
                save=Save(every=0),
                callbacks=[turns],
                log=Log(),
            ),
            out=Path(folder) / "run",
            quiet=True,
        )


def trl_side(row: Row, model: Path, steps: int, frugal: bool) -> None:
    """Train with TRL's GRPOTrainer, with less memory by bfloat16 and gradient checkpointing if `frugal`."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from tests.bench.work import questions

    gate = Gate()

    class Turns(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            gate.wait()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            gate.report(length=lengths[-1])

    lengths: list[float] = []

    def measured(completions: Any, completion_ids: Any, **more: Any) -> list[float]:
        lengths.append(statistics.mean(map(len, completion_ids)))
        return reward(completions, **more)

    adapter = None
    if row.lora:
        from peft import LoraConfig

        adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    rows = [{"prompt": [{"role": "user", "content": q}], "answer": a} for q, a in questions(row.prompts * steps, 3)]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=row.trl_micro_batch, num_generations=row.samples,
            gradient_accumulation_steps=row.prompts * row.samples // row.trl_micro_batch,
            max_completion_length=row.length, beta=row.kl, learning_rate=1e-6, max_steps=steps, logging_steps=1,
            save_strategy="no", report_to="none", use_cpu=True, temperature=1.0, top_k=0, top_p=1.0, disable_tqdm=True,
            bf16=frugal, gradient_checkpointing=frugal,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model), reward_funcs=measured, args=config,
            train_dataset=Dataset.from_list(rows), processing_class=AutoTokenizer.from_pretrained(model),
            peft_config=adapter, callbacks=[Turns()],
        )  # fmt: skip
        gate.report(rss=reset_peak())
        trainer.train()


def product_rate(seconds: float = 0.3) -> float:
    """Return the operations a CPU second of large products in float32, on one thread."""
    import torch

    torch.set_num_threads(1)
    n, best, start = 1024, 0.0, time.process_time()
    one, other = torch.randn(n, n), torch.randn(n, n)
    while time.process_time() - start < seconds:
        before = time.process_time()
        torch.nn.functional.linear(one, other)
        best = max(best, 2 * n**3 / (time.process_time() - before))
    return best


def operations(row: Row, prompt: float, length: float, vocabulary: int = 512) -> float:
    """Return the operations of a step's products, for prompts and answers of these mean lengths."""
    from tests.bench.work import SIZES

    hidden, layers, between, heads, kv_heads = SIZES[row.size]
    answers = row.prompts * row.samples * length
    tokens = row.prompts * prompt + answers
    weights = layers * hidden * (2 * hidden + 2 * hidden * kv_heads / heads + 3 * between)
    seen = row.prompts * prompt * prompt / 2 + answers * (prompt + length / 2)
    forward = 2 * tokens * weights + 4 * layers * hidden * seen + 2 * answers * hidden * vocabulary
    return forward * (1 + (2 if row.lora else 3) + bool(row.kl))


def peak() -> float:
    """Return the peak of this process's memory in MB since `reset_peak`."""
    return _status("VmHWM")


def reset_peak() -> float:
    """Return this process's memory in MB, and start to measure its peak anew."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def _status(key: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and all that it has started."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        children = [c for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()]
    except FileNotFoundError:
        return 0.0
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_seconds(int(child)) for child in children)


def python_path() -> str:
    """Return the path of modules for a process of a bench: this checkout before all others."""
    return os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))


class Side:
    """A trainer in a process of its own, which a bench starts with `--side`."""

    def __init__(self, name: str, arguments: list[str], module: str = "tests.bench.step") -> None:
        self.name = name
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": python_path()}
        self.process = subprocess.Popen(
            (sys.executable, "-W", "ignore", "-m", module, *arguments, "--side", name),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log(), text=True, env=environment, cwd=ROOT,
        )  # fmt: skip
        self.base = self._read()["rss"]

    def _log(self) -> IO[str]:
        self.log = tempfile.NamedTemporaryFile("w+", suffix=f"-{self.name}.log")  # noqa: SIM115
        return self.log  # type: ignore[return-value]

    def _read(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} failed:\n{Path(self.log.name).read_text()[-4000:]}")
        return json.loads(line)  # type: ignore[no-any-return]

    def step(self) -> dict[str, float]:
        """Make one step; return its CPU seconds and metrics."""
        assert self.process.stdin is not None
        before = cpu_seconds(self.process.pid)
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        metrics = self._read()
        return {**metrics, "cpu": cpu_seconds(self.process.pid) - before, "peak": metrics["peak"] - self.base}

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def summarize(mine: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians of a side's metrics, its highest peak, and the mean length of what was sampled."""
    found = {k: statistics.median(m[k] for m in mine) for k in mine[0]}
    return {**found, "peak": max(m["peak"] for m in mine), "length": statistics.mean(m["length"] for m in mine)}


def compare(name: str, steps: int, sides: list[str], more: list[str]) -> None:
    """Print a line of the table: medians of CPU seconds a step, the first step left out."""
    running = [Side(side, [name, f"--steps={steps}", *more]) for side in sides]
    try:
        rounds, rates = [], []
        for _ in range(steps):
            rounds.append([side.step() for side in running])
            rates.append(product_rate())
        rounds = rounds[1:]
    finally:
        for side in running:
            side.close()
    cells = []
    for i, side in enumerate(running):
        found = summarize([r[i] for r in rounds])
        times = " ".join(f"{k} {found[k]:.2f}" for k in ("sample", "logps", "update") if k in found)
        cells.append(f"{side.name} {found['cpu']:.2f} s +{found['peak']:.0f} MB, length {found['length']:.0f} {times}")
        if "prompt" in found:
            floor = operations(ROWS[name], found["prompt"], found["length"]) / statistics.median(rates)
            cells.append(f"floor {floor:.2f} s, rlkit {found['cpu'] / floor:.2f} times")
    for i, side in enumerate(running[:-1]):
        ratios = [r[i]["cpu"] / r[-1]["cpu"] for r in rounds]
        per_token = [ratio * r[-1]["length"] / r[i]["length"] for ratio, r in zip(ratios, rounds, strict=True)]
        by_token = f"by token {statistics.median(per_token):.2f}"
        cells.append(f"{side.name} / {running[-1].name} {statistics.median(ratios):.2f} ({by_token})")
    cells.append(f"goal {ROWS[name].goal}")
    print(f"{name:12}", " | ".join(cells), flush=True)


def _options(given: list[str]) -> Iterator[tuple[str, Any]]:
    for option in given:
        name, _, value = option.partition("=")
        yield name, json.loads(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--only", action="append", choices=SIDES)
    parser.add_argument("--train", action="append", default=[], help="an option of the section train, as NAME=JSON")
    parser.add_argument("--model")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side is not None:
        row = Row(**json.loads(given.point)) if given.point else ROWS[given.rows[0]]
        model = Path(given.model)
        if given.side.startswith("trl"):
            return trl_side(row, model, given.steps, given.side == "trl-bf16")
        if given.side == "minimal":
            from tests.bench.minimal import train

            return train(row, model, given.steps)
        precision: Precision = "bf16-mixed" if given.side == "rlkit-bf16" else "32-true"
        return rlkit_side(row, model, given.steps, precision, dict(_options(given.train)))
    from tests.bench.work import save_model

    more = [f"--train={option}" for option in given.train]
    with tempfile.TemporaryDirectory() as folder:
        for size in {ROWS[name].size for name in given.rows}:
            save_model(Path(folder) / size, size)
        for name in given.rows:
            where = f"--model={Path(folder) / ROWS[name].size}"
            compare(name, given.steps, given.only or ["trl", "minimal", "rlkit"], [where, *more])
    return None


if __name__ == "__main__":
    main()

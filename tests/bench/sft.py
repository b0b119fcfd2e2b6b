"""Supervised fine-tuning with rlkit and with TRL, whole runs: `python -m tests.bench.sft`.

Both train the shipped tiny model on the same rows of `Arithmetic` in the same order, a batch an optimizer step, with a
constant learning rate. First the losses of 20 steps are compared; then the two alternate, and what is measured is the
CPU seconds of the whole tree of processes from the command to its end, start-up included, on one thread.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.quickstart import run
from tests.bench.step import ROOT

ROWS, RATE, COMPARED = 128, 1e-4, 20


def trl(rows: Path, steps: int, metrics: Path) -> None:
    """Train with TRL's SFTTrainer on tokens and masks; write the loss of each step."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    losses: list[float] = []

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            found = super().compute_loss(*args, **kwargs)
            losses.append(float(found[0] if isinstance(found, tuple) else found))
            return found

    tiny = str(ROOT / "rlkit" / "models" / "tiny")
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder, per_device_train_batch_size=ROWS, max_steps=steps, learning_rate=RATE,
            lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
            bf16=False, disable_tqdm=True, gradient_checkpointing=False, max_grad_norm=1.0, weight_decay=0.0, seed=0,
            packing=False, completion_only_loss=True, max_length=None,
        )  # fmt: skip
        InOrder(
            model=AutoModelForCausalLM.from_pretrained(tiny), args=config,
            train_dataset=Dataset.from_list(json.loads(rows.read_text(encoding="utf-8"))),
            processing_class=AutoTokenizer.from_pretrained(tiny),
        ).train()  # fmt: skip
    metrics.write_text(json.dumps(losses), encoding="utf-8")


def rlkit_run(steps: int, out: Path, *options: str) -> tuple[float, list[float]]:
    """Return CPU seconds, and the loss of each step."""
    words = (
        f"--train.steps={steps}", f"--train.prompts_per_step={ROWS}", f"--train.lr={RATE}", "--train.schedule=Constant",
        "--train.warmup_steps=0", "--validation=null", "--save.every=0", f"--out={out}", *options,
    )  # fmt: skip
    seconds = run([sys.executable, "-m", "rlkit", "fit", "--recipe", "quick_sft", *words])
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return seconds, [json.loads(line)["policy/loss"] for line in lines]


def trl_run(rows: Path, steps: int, metrics: Path) -> tuple[float, list[float]]:
    """Return CPU seconds, and the loss of each step."""
    words = [f"--trl={rows}", f"--steps={steps}", f"--metrics={metrics}"]
    seconds = run([sys.executable, "-W", "ignore", "-m", "tests.bench.sft", *words])
    return seconds, json.loads(metrics.read_text(encoding="utf-8"))


def rows_of(out: Path, file: Path) -> None:
    """Write the tokens and masks that a run has trained on, step by step."""
    rows = []
    for path in sorted((out / "rollouts").glob("step-*.jsonl.gz")):
        known = map(json.loads, gzip.decompress(path.read_bytes()).decode().splitlines())
        rows += [{"input_ids": row["tokens"], "completion_mask": row["mask"]} for row in known]
    file.write_text(json.dumps(rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trl", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--metrics", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.trl is not None:
        return trl(given.trl, given.steps, given.metrics)
    with tempfile.TemporaryDirectory() as name:
        folder, ratios = Path(name), []
        _, mine = rlkit_run(given.steps, folder / "all", "--log.rollouts.limit=null")
        rows_of(folder / "all", folder / "rows.json")
        for number in range(given.rounds):
            theirs, known = trl_run(folder / "rows.json", given.steps, folder / "trl.json")
            ours, _ = rlkit_run(given.steps, folder / str(number))
            ratios.append(theirs / ours)
            print(f"trl {theirs:.1f} s, rlkit {ours:.1f} s: {ratios[-1]:.2f}", flush=True)
        gap = max(abs(a - b) for a, b in zip(mine[:COMPARED], known[:COMPARED], strict=True))
        print(f"losses of {COMPARED} steps: {mine[0]:.4f} to {mine[COMPARED - 1]:.4f}, at most {gap:.1e} apart")
        print(f"{given.steps} steps of {ROWS} rows: median ratio {statistics.median(ratios):.2f}")
    return None


if __name__ == "__main__":
    main()

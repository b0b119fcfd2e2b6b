"""The quickstart's own task with rlkit and with TRL, whole runs: `python -m tests.bench.quickstart`.

Both train the shipped tiny model on the same rows with the same reward, 32 prompts x 8 samples a step, at most 12
tokens, and the same learning rates; TRL (the extra `bench`) with its best micro-batch, no checkpoints on either side.
The two alternate; what is measured is CPU seconds of the whole tree of processes from the command to its end, start-up
included, on one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.step import ROOT, python_path

PROMPTS, SAMPLES, TOKENS, RATE, WARMUP = 32, 8, 12, 1e-3, 5
GOAL, LAST = 3.0, 10
"""How many times as fast rlkit must be; so many steps at the end show what was learned."""


def trl(steps: int, micro_batch: int, metrics: Path) -> None:
    """Train with TRL's GRPOTrainer; write the mean accuracy of each step."""
    from datasets import Dataset
    from rlkit_math.answers import equal, final_answer
    from rlkit_tasks.arithmetic import Arithmetic
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    tiny = ROOT / "rlkit" / "models" / "tiny"
    task, accuracies = Arithmetic(), []

    def score(completions: Any, answer: list[str], **_: Any) -> list[float]:
        found = [final_answer(completion[0]["content"])[0] for completion in completions]
        scores = [float(x is not None and equal(x, a)) for x, a in zip(found, answer, strict=True)]
        accuracies.append(statistics.mean(scores))
        return scores

    prompts = [task.prompt(row, i) for i, row in enumerate(task.rows("train"))]
    rows = Dataset.from_list([{"prompt": p.messages, "answer": p.answer} for p in prompts])
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=micro_batch, num_generations=SAMPLES,
            gradient_accumulation_steps=PROMPTS * SAMPLES // micro_batch, max_completion_length=TOKENS, beta=0.0,
            learning_rate=RATE, lr_scheduler_type="linear", warmup_steps=WARMUP, max_steps=steps, logging_steps=1,
            save_strategy="no", report_to="none", use_cpu=True, temperature=1.0, top_k=0, top_p=1.0, bf16=False,
            disable_tqdm=True, gradient_checkpointing=False, max_grad_norm=1.0, seed=0,
        )  # fmt: skip
        GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(str(tiny)), reward_funcs=score, args=config, train_dataset=rows,
            processing_class=AutoTokenizer.from_pretrained(str(tiny)),
        ).train()  # fmt: skip
    metrics.write_text(json.dumps(accuracies), encoding="utf-8")


def run(command: list[str]) -> float:
    """Run a command; return the CPU seconds of all its processes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": python_path()}
    before = os.times()
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    after = os.times()
    if done.returncode:
        raise SystemExit(f"{command} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return after.children_user + after.children_system - before.children_user - before.children_system


def rlkit_run(steps: int, out: Path) -> tuple[float, list[float]]:
    """Return CPU seconds, and the accuracy of each step."""
    options = [f"--train.steps={steps}", "--validation=null", "--save.every=0", f"--out={out}"]
    seconds = run([sys.executable, "-m", "rlkit", "fit", "--recipe", "quickstart", *options])
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return seconds, [json.loads(line)["accuracy"] for line in lines]


def trl_run(steps: int, micro_batch: int, metrics: Path) -> tuple[float, list[float]]:
    """Return CPU seconds, and the accuracy of each step."""
    side = [f"--steps={steps}", f"--micro-batch={micro_batch}", f"--trl={metrics}"]
    seconds = run([sys.executable, "-W", "ignore", "-m", "tests.bench.quickstart", *side])
    return seconds, json.loads(metrics.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--micro-batch", type=int, default=256, help="TRL's")
    parser.add_argument("--trl", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.trl is not None:
        return trl(given.steps, given.micro_batch, given.trl)
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.rounds):
            theirs, learned = trl_run(given.steps, given.micro_batch, Path(folder) / "trl.json")
            ours, ours_learned = rlkit_run(given.steps, Path(folder) / f"rlkit-{number}")
            ratios.append(theirs / ours)
            for name, seconds, curve in (("trl", theirs, learned), ("rlkit", ours, ours_learned)):
                first, last = statistics.mean(curve[:LAST]), statistics.mean(curve[-LAST:])
                print(f"{name:6} {seconds:6.1f} s, accuracy {first:.2f} -> {last:.2f} ({LAST} steps each)", flush=True)
            print(f"ratio {ratios[-1]:.2f} (goal {GOAL})", flush=True)
    print(f"quickstart, {given.steps} steps: median ratio {statistics.median(ratios):.2f}")
    return None


if __name__ == "__main__":
    main()

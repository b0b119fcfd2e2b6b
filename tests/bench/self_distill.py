"""What a policy learns from itself with the answer in its context: `python -m tests.bench.self_distill`.

It begins with a policy that was trained, by `quick_sft`, on additions with the answer behind the question. Without the
answer it adds badly; it then is its own teacher, which reads the answer. What is printed are accuracies on held-out
additions without the answer, before and after: with the weights that the run began with as the teacher, with the same
where they read a line break instead, and with averaged weights.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rlkit.tasks import Arithmetic
from tests.bench.quickstart import run

SEEDS = (0, 1, 2)
HINT = "\nThe answer is {answer}."
AVERAGED = "--train.ema=0.99"
TEACHERS = {
    "the policy as the run began, which reads the answer": ("{prompt}" + HINT,),
    "the same, which reads a line break instead": ("{prompt}\n",),
    "averaged weights, which read the answer": ("{prompt}" + HINT, AVERAGED),
}


def fit(recipe: str, out: Path, *words: str) -> dict[str, Any]:
    """Train; return what validation measured before and after."""
    run([sys.executable, "-m", "rlkit", "fit", "--recipe", recipe, f"--out={out}", *words])
    found: dict[str, Any] = json.loads((out / "result.json").read_text(encoding="utf-8"))["validation"]
    return found


def use_of_hints(out: Path, *words: str) -> dict[str, Any]:
    """Train the tiny model on additions with the answer behind the question."""
    files = {}
    for option, split in (("path", "train"), ("validation_path", "validation")):
        rows = [{**row, "completion": f"#### {row['answer']}"} for row in Arithmetic().rows(split)]
        files[option] = f"{out}-{split}.jsonl"
        Path(files[option]).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    task = {"class_path": "Jsonl", "init_args": {**files, "template": "{question}" + HINT}}
    return fit("quick_sft", out, f"--task={json.dumps(task)}", *words)


def self_distillation(start: Path, out: Path, context: str, *words: str) -> dict[str, Any]:
    """Train a policy on additions by its own log-probs with more in its context."""
    teacher = json.dumps({"path": None, "context": context})
    return fit("quick_distill", out, f"--model.path={start}", f"--teacher={teacher}", "--train.lr=3e-4", *words)


def main() -> None:
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            start, word = Path(folder) / "start", f"--train.seed={seed}"
            known = use_of_hints(start, "--train.steps=120", "--train.prompts_per_step=64", word)["after"]
            print(
                f"seed {seed}, with the answer: {known['accuracy']:.3f} greedy, {known['sampled_accuracy']:.3f} sampled"
            )
            for name, (context, *words) in TEACHERS.items():
                found = self_distillation(start, Path(folder) / name, context, "--train.steps=80", word, *words)
                metrics = [found[when][key] for key in ("accuracy", "sampled_accuracy") for when in ("before", "after")]
                print(f"  {name}: " + "greedy {:.3f} to {:.3f}, sampled {:.3f} to {:.3f}".format(*metrics), flush=True)


if __name__ == "__main__":
    main()

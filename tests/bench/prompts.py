"""How long it takes to measure 100,000 prompts: the first time, and from the cache; one CPU and all of them.

`python -m tests.bench.prompts [N]` prints a line for each. Prompts are GSM8K's questions as `grpo_gsm8k` asks them,
numbered, so that no two are equal; the tokenizer is that of `tiny` (a token is a byte: about 300 a prompt).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

QUESTIONS = Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "train.jsonl"


def child(path: str) -> None:
    """Load a task's rows and drop the long ones, as `fit` does before a model is loaded; print the seconds."""
    from rlkit.commands import parse
    from rlkit.data.data import load_data

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # as the command does
    options = ["--recipe=quickstart", "--task=HFDataset", f"--task.path={path}", "--validation=null"]
    parsed = parse("fit", [*options, "--rollout.overlong=drop", "--rollout.max_prompt_tokens=400"], [])
    start, cpu = time.perf_counter(), time.process_time()
    data = load_data(parsed.recipe)
    seconds = time.perf_counter() - start
    print(json.dumps({"kept": len(data.order.rows), "seconds": seconds, "cpu": time.process_time() - cpu}))


def main() -> None:
    """Run each case in a process of its own."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    questions = [json.loads(line)["question"] for line in QUESTIONS.read_text().splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.jsonl"
        with path.open("w") as lines:
            for i in range(count):
                row = {"prompt": f"{questions[i % len(questions)]} ({i})", "answer": "1"}
                lines.write(json.dumps(row) + "\n")
        for name, threads in (("one CPU", "1"), ("all CPUs", None)):
            environment = {**os.environ, "XDG_CACHE_HOME": f"{folder}/{threads}", "HF_HUB_OFFLINE": "1"}
            environment |= {"RAYON_NUM_THREADS": threads} if threads else {}
            for when in ("first", "again"):
                command = (sys.executable, "-m", "tests.bench.prompts", "--child", str(path))
                done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                print(f"{count:,} prompts, {name}, {when}: {done.stdout.splitlines()[-1]}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2])
    else:
        main()

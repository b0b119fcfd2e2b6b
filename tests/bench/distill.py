"""What on-policy distillation takes beside GRPO: `python -m tests.bench.distill`.

GRPO's quickstart trains a policy, with validations on the way; the result teaches the same first policy by
`quick_distill`: by its log-probs of the policy's tokens, and by its distributions with `Distillation`, on the policy's
samples and on recorded answers. Of each it prints the steps, the sampled tokens and the seconds of steps until greedy
accuracy on held-out prompts first reaches 0.95; those of validations do not count.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.bench.quickstart import run

ENOUGH, EVERY = 0.95, 4
WAYS = {
    "distillation": (),
    "forward KL": ("--loss=Distillation", "--loss.beta=0"),
    "Jensen-Shannon": ("--loss=Distillation",),
    "reverse KL": ("--loss=Distillation", "--loss.beta=1"),
    "recorded answers": ("--loss=Distillation", "--loss.beta=0", "--rollout={engine: Recorded}"),
}
"""Options of `quick_distill`."""
PHASES = ("sample", "logps", "score", "update", "sync")


def curve(recipe: str, out: Path, *words: str) -> list[dict[str, float]]:
    """Train; return the metrics of each step."""
    options = (f"--validation={{every: {EVERY}, samples: 0}}", f"--out={out}", *words)
    run([sys.executable, "-m", "rlkit", "fit", "--recipe", recipe, *options])
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        teacher = Path(folder) / "grpo"
        curves = {"GRPO": curve("quickstart", teacher)}
        for name, words in WAYS.items():
            curves[name] = curve("quick_distill", Path(folder) / name, f"--teacher.path={teacher}", *words)
        for name, rows in curves.items():
            done = next((i for i, row in enumerate(rows) if row.get("validation/accuracy", 0) >= ENOUGH), len(rows) - 1)
            known = rows[: done + 1]
            tokens = sum(row.get("rollout/tokens", 0) for row in known)
            seconds = sum(row.get(f"time/{phase}", 0.0) for row in known for phase in PHASES)
            reached = max(row.get("validation/accuracy", 0) for row in known)
            print(f"{name}: accuracy {reached:.3f} after {done + 1} steps, {tokens:,.0f} tokens, {seconds:.0f} s")


if __name__ == "__main__":
    main()

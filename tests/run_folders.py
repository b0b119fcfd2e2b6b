"""Run folders written for tests, without a run."""

from __future__ import annotations

import json
from pathlib import Path

from rlkit.run.folder import RunFolder
from rlkit.types import Prompt, Score, StopReason, Trajectory, Turn

HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)> \x1b[31mred\x1b[0m \x00 \u2028 \u202e ]]> --> "
    "\ud800 {{7*7}} https://evil.example/x.js"
)
"""What a model may write: tags, an end of a script, escape codes, a NUL, a line separator, half of a pair."""


def trajectory(prompt: str, group: int, reward: float, text: str = "#### 7") -> Trajectory:
    row = Prompt(prompt, [{"role": "user", "content": f"What is {prompt}?"}], "7", {"data_source": "sums"})
    mask = [False, False, True, True]
    return Trajectory(
        row, group, [257, 84, 16, 258], mask, [0.0, 0.0, -0.5, -2.25], [-1, -1, 3, 3], StopReason.STOP,
        [Turn("user", 0, 2), Turn("assistant", 2, 4)], text, score=Score(reward, {"accuracy": reward}),
        credit={"advantages": [0.0, 0.0, reward - 0.5, reward - 0.5]},
    )  # fmt: skip


def write_run(path: Path, steps: int = 3, text: str = "#### 7", recipe: str = "model:\n  path: tiny\n") -> Path:
    """Write a run's folder: two groups of two samples a step, and a validation before and after."""
    (path / "rollouts").mkdir(parents=True)
    folder = RunFolder(path, recipe)
    (path / "recipe.yaml").write_text(recipe)
    (path / "environment.json").write_text(json.dumps({"python": "3.11.7", "run_id": "a"}))
    lines = []
    for step in range(1, steps + 1):
        rows = [trajectory(f"{g} + {step}", g, float(s), text) for g in range(2) for s in range(2)]
        folder.dump(f"step-{step:05d}", rows)
        metrics = {"step": step, "reward/mean": step / 10, "time/sample": 2.0, "time/update": 1.0, "time/mfu": 0.4}
        lines.append(json.dumps(metrics) + "\n")
    (path / "metrics.jsonl").write_text("".join(lines))
    validation = {"accuracy": 0.25, "accuracy_low": 0.1, "accuracy_high": 0.5}
    after = {**validation, "accuracy": 0.75}
    folder.result({"status": "ok", "steps": steps, "validation": {"before": validation, "after": after}})
    return path

"""Twenty problems with tests, as in MBPP: programs are graded, and a run samples, grades and learns."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rlkit.cli.main import main
from rlkit.rewards import CodeReward
from rlkit.testing import example_trajectory
from rlkit.types import Score, Trajectory
from tests.conftest import FAST, read_jsonl

pytestmark = pytest.mark.slow

PROBLEMS = Path(__file__).parent / "problems.jsonl"


def test_right_programs_pass_and_wrong_ones_fail() -> None:
    """The wrong ones return something else, never end, exit, define another name, or are no Python."""
    groups: list[list[Trajectory]] = []
    for row in read_jsonl(PROBLEMS):
        group = [example_trajectory(row[column]) for column in ("completion", "wrong")]
        for trajectory in group:
            trajectory.prompt = replace(trajectory.prompt, answer=json.dumps(row["tests"]))
        groups.append(group)
    reward = CodeReward(allow_code=True, seconds=1.0)

    async def score() -> list[list[Score]]:
        reward.bind(None)  # type: ignore[arg-type]
        return await asyncio.gather(*map(reward.score, groups))

    assert [[score.reward for score in scores] for scores in asyncio.run(score())] == [[1.0, 0.0]] * 20


def test_a_run_learns_which_program_passes(tmp_path: Path) -> None:
    """The structure leaves the policy four programs; it learns from the tests which of them is right."""
    row = {"question": "The larger number?", "tests": ["assert f(2, 7) == 7", "assert f(4, 1) == 4"]}
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(row)}\n" * 8)
    programs = [f"def f(a, b):\n    return {value}" for value in ("a + b", "a * b", "max(a, b)", "a")]
    sampling = {"max_tokens": 60, "structure": {"regex": "|".join(map(re.escape, programs))}}
    data = {"path": str(file), "validation_path": str(file), "template": "{question}", "answer_field": "tests"}
    recipe = {
        "task": {"class_path": "HFDataset", "init_args": data},
        "reward": {"class_path": "CodeReward", "init_args": {"allow_code": True}},
        "rollout": {"sampling": {**sampling, "top_k": 8}},
        "validation": {"sampling": sampling},
    }
    (tmp_path / "programs.yaml").write_text(yaml.safe_dump(recipe))
    words = ("--recipe=quickstart", f"--recipe={tmp_path / 'programs.yaml'}", *FAST, "--validation.limit=2")
    out = tmp_path / "out"
    assert (
        main(["fit", *words, "--train.steps=8", "--train.prompts_per_step=2", "--rollout.group_size=8", f"--out={out}"])
        == 0
    )
    steps = read_jsonl(out / "metrics.jsonl")
    assert all(row["mismatch/max"] < 1e-5 for row in steps)
    rollouts = [row for step in (1, 8) for row in read_jsonl(out / "rollouts" / f"step-{step:05d}.jsonl.gz")]
    assert all(row["reward"] == float(row["text"] == programs[2]) for row in rollouts)
    validation = json.loads((out / "result.json").read_text())["validation"]
    assert (validation["before"]["accuracy"], validation["after"]["accuracy"]) == (0, 1)
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"] + 0.5

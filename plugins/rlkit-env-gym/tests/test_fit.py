"""Runs of `rlkit fit` with the installed plugin and the models that rlkit ships."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import rlkit

PACKAGE = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed plugin."""
    folder = tmp_path_factory.mktemp("site")
    options = ("--no-deps", "--no-build-isolation", "-q", "--target", str(folder))
    subprocess.run((sys.executable, "-m", "pip", "install", *options, str(PACKAGE)), check=True, capture_output=True)
    return folder


def run(site: Path, cwd: Path, *args: str) -> str:
    done = rlkit(*args, cwd=cwd, site=str(site))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def trajectories(run: Path, step: int) -> list[dict[str, Any]]:
    with gzip.open(run / "rollouts" / f"step-{step:05d}.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


def test_a_lake_is_learnt_in_a_few_steps(site: Path, tmp_path: Path) -> None:
    run(site, tmp_path, "fit", "--recipe=quick_lake", "--train.steps=4", "--out=run")
    rows = trajectories(tmp_path / "run", 1)
    assert all(row["messages"] == [{"role": "system", "content": "lake"}] for row in rows)
    assert {row["conversation"][0]["content"] for row in rows} == {"[S]F\nHG\nYour action: one of 1, 2, 3, 4."}
    for row in rows:
        assert row["error"] is None
        assert row["reward"] == sum(row["turn_rewards"])
        if row["reward"]:  # the goal is entered from the cell on the right, which is entered from the start
            actions = [m["content"].strip() for m in row["conversation"] if m["role"] == "assistant"]
            assert row["turn_rewards"] == [0.0] * (len(actions) - 1) + [1.0]
            assert [action for action in actions if action in "23"][-2:] == ["3", "2"]
    validation = json.loads((tmp_path / "run" / "result.json").read_text())["validation"]
    assert validation["after"]["sampled_accuracy"] > validation["before"]["sampled_accuracy"] + 0.1


RECIPE = """
model: {path: tiny}
task: {class_path: ReasoningGym, init_args: {dataset: {chain_sum: 1, n_queens: 1}, instructions: ""}}
rollout: {group_size: 2, sampling: {max_tokens: 8}}
reward: {class_path: ReasoningGymScore, init_args: {tagged: false}}
advantage: GRPO
loss: ClipLoss
train: {steps: 2, prompts_per_step: 8, lr: 1.0e-3}
validation: {limit: 8}
fabric: {accelerator: cpu, devices: 1}
"""


def test_problems_are_scored_in_a_run(site: Path, tmp_path: Path) -> None:
    (tmp_path / "reasoning.yaml").write_text(RECIPE)
    run(site, tmp_path, "fit", "--recipe=reasoning.yaml", "--out=run")
    rows = trajectories(tmp_path / "run", 1) + trajectories(tmp_path / "run", 2)
    assert len(rows) == 32
    assert {row["meta"]["data_source"] for row in rows} == {"chain_sum", "n_queens"}
    assert all(row["error"] is None and 0 <= row["reward"] <= 1 for row in rows)


def test_the_plugin_keeps_its_contracts(site: Path, tmp_path: Path) -> None:
    report = run(site, tmp_path, "plugins", "test", "env-gym")
    assert "failed" not in report
    run(site, tmp_path, "recipe", "show", "grpo_reasoning")

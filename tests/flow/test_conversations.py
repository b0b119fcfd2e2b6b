"""Tools, users and games from `rlkit fit`: they run, and the shipped model of several turns learns to use them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, read_jsonl, rlkit, rlkit_in_process

pytestmark = pytest.mark.slow


def fit(*args: str, cwd: Path, site: str = "") -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run `fit` into `run`; give the metrics and the validation."""
    start = partial(rlkit, site=site) if site or "--fabric.devices=2" in args else rlkit_in_process
    done = start("fit", *args, "--out=run", cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((cwd / "run" / "result.json").read_text())
    return read_jsonl(cwd / "run" / "metrics.jsonl"), result["validation"]


def rate(rows: list[dict[str, Any]], trajectories: int) -> float:
    """Tool calls that were answered, a conversation."""
    return (
        sum(row["conversation/tool_calls"] - row.get("conversation/tool_errors", 0) for row in rows)
        / len(rows)
        / trajectories
    )


def test_the_model_learns_to_call_the_calculator(tmp_path: Path) -> None:
    """It begins with a call in a quarter of its answers, and half of them right."""
    rows, validation = fit("--recipe=quick_tool", cwd=tmp_path)
    assert rate(rows[:2], 128) < 0.4
    assert rate(rows[-4:], 128) > 0.7
    assert validation["after"]["sampled_accuracy"] > validation["before"]["sampled_accuracy"] + 0.1
    assert validation["after"]["accuracy"] > validation["before"]["accuracy"] + 0.1
    assert max(row["mismatch/max"] for row in rows) < 1e-3
    last = read_jsonl(tmp_path / "run" / "rollouts" / "step-00020.jsonl.gz")
    [one, *_] = [row for row in last if row["reward"] == 1 and len(row["turns"]) == 4]
    spans = {role: one["mask"][start:end] for role, start, end in one["turns"]}
    assert set(spans["tool"]) == set(spans["user"]) == {0}
    assert set(spans["assistant"]) == {1}
    said = rlkit_in_process("generate", "--recipe=quick_tool", "--prompt", "28 + 14 = ?", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert "28 + 14 = ?" in said.stdout


def test_a_user_lets_the_policy_try_again(tmp_path: Path) -> None:
    """The quickstart with a user who doubts wrong answers: they cost, and the second try is trained on too."""
    rows, _ = fit(
        "--recipe=quickstart", "--interaction=Retry", "--interaction.penalty=0.5", "--conversation.turns=3",
        "--train.steps=3", "--train.prompts_per_step=8", "--validation.limit=8", cwd=tmp_path,
    )  # fmt: skip
    assert all(1 < row["conversation/turns"] <= 2 for row in rows)
    trajectories = read_jsonl(tmp_path / "run" / "rollouts" / "step-00001.jsonl.gz")
    assert {round(row["reward"] - row["components"]["accuracy"], 3) for row in trajectories} <= {0.0, -0.5, -1.0}
    assert all(
        row["reward"] == pytest.approx(row["components"]["accuracy"] + sum(row["turn_rewards"])) for row in trajectories
    )
    assert any(sum(row["turn_rewards"]) < 0 for row in trajectories)
    assert {len(row["turns"]) for row in trajectories} == {2, 4}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugins, installed."""
    folder = tmp_path_factory.mktemp("site")
    packages = [str(ROOT / "plugins" / name) for name in ("rlkit-env-games", "rlkit-tool-search")]
    command = (
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "--target",
        str(folder),
    )
    done = subprocess.run((*command, *packages), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_model_learns_to_guess(site: Path, tmp_path: Path) -> None:
    """Of four numbers two guesses find three: 0.75 is the best, and guessing blindly finds 0.44."""
    rows, validation = fit("--recipe=quick_guess", cwd=tmp_path, site=str(site))
    assert validation["before"]["sampled_accuracy"] < 0.55
    assert 0.6 < validation["after"]["sampled_accuracy"] <= 0.82
    assert rows[-1]["conversation/turns"] <= 2


def test_the_model_learns_to_search(site: Path, tmp_path: Path) -> None:
    """Answers to held-out questions stand in the corpus alone."""
    for path in (ROOT / "plugins" / "rlkit-tool-search" / "recipes").glob("*"):
        shutil.copy(path, tmp_path / path.name)
    rows, validation = fit("--recipe=quick_search.yaml", "--train.steps=12", cwd=tmp_path, site=str(site))
    assert rate(rows[-3:], 128) > rate(rows[:2], 128) + 0.2
    assert validation["after"]["sampled_accuracy"] > validation["before"]["sampled_accuracy"] + 0.1


@pytest.mark.parametrize(
    "recipe", ["grpo_guess", str(ROOT / "plugins" / "rlkit-tool-search" / "recipes" / "grpo_search.yaml")]
)
def test_the_plugins_recipes_parse(recipe: str, site: Path, tmp_path: Path) -> None:
    done = rlkit("recipe", "show", recipe, cwd=tmp_path, site=str(site))
    assert done.returncode == 0, done.stderr


def test_conversations_on_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    args = (
        "--recipe=quick_tool", "--train.steps=1", "--train.prompts_per_step=4", "--validation.limit=2",
        "--validation.samples=0",
    )  # fmt: skip
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    [alone], _ = fit(*args, cwd=one)
    [both], _ = fit(*args, "--fabric.devices=2", "--fabric.strategy=fsdp2", cwd=two)
    for name in ("reward/mean", "rollout/tokens", "policy/loss", "grad_norm", "conversation/tool_calls"):
        assert both[name] == pytest.approx(alone[name], abs=1e-4), name

"""The headline of a report, of files of any shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rlkit_report.headline import headline

RECIPE = """
model: {path: org/model, head: score}
task: {class_path: rlkit.tasks.HubTask, init_args: {path: org/data}}
rollout: {engine: {class_path: rlkit.engines.Recorded, init_args: {}}}
loss: {class_path: rlkit.losses.BradleyTerry, init_args: {}}
train: {steps: 20}
"""


def of(run: Path, recipe: str = RECIPE, metrics: Any = None, **result: Any) -> dict[str, Any]:
    environment = {"command": ["rlkit", "fit", "--recipe", "/home/me/mine.yaml"], "devices": "2 x H100"}
    return headline(run, recipe, environment, result, metrics or {})


def test_it_names_what_is_trained_on_what(tmp_path: Path) -> None:
    assert of(tmp_path)["facts"] == {
        "model": "org/model, reward model",
        "task": "HubTask (org/data)",
        "method": "BradleyTerry, recorded answers",
        "recipe": "mine",
        "devices": "2 x H100",
    }
    reward = "reward: {class_path: PythonReward, init_args: {function: 'reward.py:score'}}"
    assert of(tmp_path, reward)["facts"]["reward"] == "PythonReward (reward.py:score)"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["rlkit", "fit", "--recipe", "a/b.yaml", "--recipe", "c"], "b"),
        (["rlkit", "fit", "--recipe=a/b.yaml"], "b"),
        (["rlkit", "fit", "quickstart", "--out=x"], "quickstart"),
        (["rlkit", "fit", "--resume", "runs/a"], None),
        (["python", "train.py"], None),
        ([3, None, "--recipe"], None),
    ],
)
def test_the_recipe_is_named_by_the_command_line(tmp_path: Path, words: list[Any], name: str | None) -> None:
    assert headline(tmp_path, "", {"command": words}, {}, {})["facts"].get("recipe") == name


def test_changes_are_of_the_first_and_the_last_validation(tmp_path: Path) -> None:
    metrics = {
        "validation/accuracy": [0.25, None, 0.5, 0.75],
        "validation/accuracy_p_start": [None, None, 0.2, 0.01],
        "validation/reward": [0.1, None, 0.2, 0.3],
        "validation/reward_stderr": [0.0, None, 0.0, 0.1],
        "validation/sampled_accuracy": [0.5, None, None, None],
        "validation/sampled_reward": [0.5, None, None, None],
    }
    changes = {row["name"]: row for row in of(tmp_path, metrics=metrics)["changes"]}
    assert list(changes) == ["greedy accuracy", "sampled_accuracy", "greedy reward"]
    assert changes["greedy accuracy"] == {
        "name": "greedy accuracy",
        "before": {"value": 0.25, "bounds": None},
        "after": {"value": 0.75, "bounds": None},
        "p_value": 0.01,
    }
    assert changes["greedy reward"]["after"]["bounds"] == pytest.approx([0.3 - 0.196, 0.3 + 0.196])
    assert changes["sampled_accuracy"]["after"] is None


def test_the_command_continues_uses_or_is_none(tmp_path: Path) -> None:
    run = tmp_path / "a run"
    run.mkdir()
    assert of(run, status="ok")["command"] is None  # no checkpoint
    (run / "checkpoints" / "step-00001").mkdir(parents=True)
    assert of(run, status="ok")["command"] == f"rlkit export --checkpoint '{run}' --out MODEL"
    assert of(run, status="failed")["command"] == f"rlkit fit --resume '{run}'"
    code = "reward: {init_args: {allow_code: true}}"
    assert of(run, status="failed", recipe=code)["command"] == f"rlkit fit --resume '{run}' --allow-code"
    elsewhere = of(run, recipe="save: {folder: s3://b/x}")["command"]
    assert elsewhere == f"rlkit fit --recipe '{run}'/recipe.yaml --out '{run}' --resume auto --save.folder s3://b/x"


@pytest.mark.parametrize("value", [None, 1, "text", [], {}, [1, {"a": 2}], {"change": []}, float("nan")])
@pytest.mark.parametrize("name", ["status", "verdict", "warnings", "error", "validation", "seconds"])
def test_results_of_any_shape_are_read(tmp_path: Path, name: str, value: object) -> None:
    shown = of(tmp_path, **{name: value})
    assert shown["verdict"] is None
    assert isinstance(shown["status"], str)
    assert all(isinstance(text, str) for text in shown["warnings"])


@pytest.mark.parametrize("recipe", ["", "[", "- a", "model: 3", "model: {lora: {rank: x}, path: [a]}", "&a [*a]", "\0",
                                    "task: {class_path: 4}\nloss: []\nrollout: 1\nsave: {folder: 2}"])  # fmt: skip
def test_recipes_of_any_shape_are_read(tmp_path: Path, recipe: str) -> None:
    assert of(tmp_path, recipe)["facts"].keys() <= {"recipe", "devices", "model", "task", "method"}


ZERO = {"reward/mean": [0.0] * 6, "reward/min": [0.0] * 6, "reward/max": [0.0] * 6, "rollout/samples": [8.0] * 6}


def test_equal_rewards_are_said_of_a_run_in_progress(tmp_path: Path) -> None:
    """The warning of fewer steps is left out."""
    problem = of(tmp_path, metrics=ZERO)["diagnosis"]
    assert problem.startswith("reward 0 in all 48 samples of 6 steps, so there is nothing to learn")
    warnings = ["warning: reward 0 in all 40 samples of 5 steps, so", "warning: slow"]
    assert of(tmp_path, metrics=ZERO, warnings=warnings)["warnings"] == ["warning: slow"]
    few = {name: values[:3] for name, values in ZERO.items()}
    assert of(tmp_path, metrics=few)["diagnosis"] is None
    assert of(tmp_path, metrics=few, status="ok")["diagnosis"].startswith("reward 0 in all 24 samples")
    assert of(tmp_path, "teacher: {path: tiny}", metrics=ZERO)["diagnosis"] is None


def test_a_reward_that_is_no_number_claims_nothing(tmp_path: Path) -> None:
    metrics = {name: ["NaN", None, *values[2:]] for name, values in ZERO.items()}
    assert of(tmp_path, metrics=metrics, status="ok")["diagnosis"].startswith("reward 0 in all 32 samples of 4 steps")
    assert of(tmp_path, metrics={"reward/min": ["NaN"], "reward/mean": [0.0]}, status="ok")["diagnosis"] is None


def test_without_validation_the_training_reward_is_the_change(tmp_path: Path) -> None:
    [change] = of(tmp_path, metrics={"reward/mean": [0.0, 0.5, 0.5, 1.0]})["changes"]
    assert change["name"] == "training reward, first and last 2 steps"
    assert (change["before"]["value"], change["after"]["value"]) == (0.25, 0.75)
    assert change["before"]["bounds"] == [pytest.approx(0.25 - 0.49), pytest.approx(0.25 + 0.49)]
    validated = {"reward/mean": [0.0, 0.5], "validation/reward": [0.25, 0.5], "validation/reward_low": [0.125, 0.25],
                 "validation/reward_high": [0.375, 0.75]}  # fmt: skip
    [change] = of(tmp_path, metrics=validated)["changes"]
    assert (change["name"], change["after"]) == ("greedy reward", {"value": 0.5, "bounds": [0.25, 0.75]})

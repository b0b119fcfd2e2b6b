"""What needs no verifiers: options, refused versions, rewards of outcomes. tests/hubs has the real package."""

from __future__ import annotations

import asyncio
import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from rlkit_authors.agents import ScriptedClient
from rlkit_env_verifiers import VerifiersAgent, VerifiersReward, VerifiersTask
from rlkit_env_verifiers.agent import OUTCOME

from rlkit.base.errors import RecipeError, UnavailableError
from rlkit.interfaces.agent import AgentTask
from rlkit.types import AgentSpan, Prompt, Score, StopReason, Trajectory

PROMPT = Prompt("sums-0", [{"role": "user", "content": "1 + 1 = ?"}], meta={"environment": "{}", "index": 0})


def scored(folder: Path, rewards: dict[str, Any], metrics: dict[str, float], **options: Any) -> Score:
    (folder / OUTCOME).write_text(json.dumps({"rewards": rewards, "metrics": metrics}))
    agent = {"folder": str(folder), "status": 0, "output": "2"}
    return VerifiersReward(**options).grade(
        Trajectory(PROMPT, 0, [], [], [], [], StopReason.STOP, text="2", span=AgentSpan(agent))
    )


@pytest.mark.parametrize(
    ("version", "error", "message"),
    [
        ("0.1.14", RecipeError, "verifiers is 0.1.14, but rlkit-env-verifiers supports >=0.4,<0.5: pip install"),
        ("0.5.0", RecipeError, "verifiers is 0.5.0, but"),
        (None, UnavailableError, "verifiers is not installed: pip install 'verifiers>=0.4,<0.5'"),
    ],
)
def test_other_versions_are_refused_by_name(
    version: str | None, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(package: str) -> str:
        if version is None:
            raise PackageNotFoundError(package)
        return version

    monkeypatch.setattr("rlkit.base.imports.metadata.version", installed)
    with pytest.raises(error, match=message):
        VerifiersTask("sums", allow_code=True).rows("train")


def test_code_is_run_only_if_the_recipe_allows_it() -> None:
    with pytest.raises(RecipeError, match="names 'sums', whose code would run; set allow_code: true"):
        VerifiersTask("sums")


@pytest.mark.parametrize("environment", ["", {}, {"taskset": None}, {"taskset": {"id": 3}}, {"id": "user-sim"}])
def test_an_environment_names_its_taskset(environment: Any) -> None:
    with pytest.raises(RecipeError, match=r"expected a taskset's name at taskset\.id"):
        VerifiersTask(environment, allow_code=True)


def test_the_reward_is_the_weighted_sum(tmp_path: Path) -> None:
    """0.5 x 1 + 1 x 0.25 - 2 x 0.5 = -0.25; `right` has a positive weight and is below 1, so the answer is wrong."""
    rewards = {"right": [0.5, 1.0], "number": [1.0, 0.25], "rude": [2.0, -0.5]}
    score = scored(tmp_path, rewards, {"letters": 3.0})
    assert score.reward == -0.25
    assert score.components == {"letters": 3.0, "right": 0.5, "number": 1.0, "rude": 2.0, "accuracy": 0.0}


def test_accuracy_is_full_marks_or_what_is_named(tmp_path: Path) -> None:
    rewards = {"right": [1.0, 1.0], "short": [0.0, 0.5], "rude": [0.0, -1.0]}
    assert scored(tmp_path, rewards, {}).components["accuracy"] == 0.0
    assert scored(tmp_path, rewards, {}, accuracy="right").components["accuracy"] == 1.0
    assert scored(tmp_path, rewards, {"accuracy": 0.75}).components["accuracy"] == 0.75
    error = scored(tmp_path, rewards, {}, accuracy="wrong").error
    assert error == "VerifiersReward has accuracy='wrong', but the environment has right, rude, short"


def test_a_rollout_without_scores_has_no_reward(tmp_path: Path) -> None:
    agent = {"folder": str(tmp_path), "status": 1, "output": "TaskError: its reward is wrong"}
    trajectory = Trajectory(PROMPT, 0, [], [], [], [], StopReason.STOP, span=AgentSpan(agent))
    score = VerifiersReward().grade(trajectory)
    assert score.reward is None
    assert score.error == "the environment has not scored the rollout: TaskError: its reward is wrong"


def test_no_row_of_data_makes_an_environment_load(tmp_path: Path) -> None:
    """A row may hold any configuration, but only a task of the recipe loads what it names."""
    result = asyncio.run(VerifiersAgent().run(AgentTask(PROMPT, tmp_path, 0), ScriptedClient()))
    assert (result.status, result.output) == (
        1,
        "the prompt is of no environment of verifiers; use `task: VerifiersTask`",
    )

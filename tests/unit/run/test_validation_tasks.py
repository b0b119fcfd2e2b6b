"""Validation of several tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import rlkit
from rlkit.cli.main import main
from rlkit.data.prompts import held_out
from rlkit.interfaces.task import Split, Task
from rlkit.recipe import Validation, check
from rlkit.run.checkpoint.resume import validation_options as of_recipe
from rlkit.tasks import Arithmetic
from rlkit.types import Prompt, Row
from tests.conftest import FAST, read_jsonl
from tests.unit.phases import recipe


class Held(Task):
    """Rows with a source of their own where `source` names one."""

    def __init__(self, count: int, source: str | None = None) -> None:
        self.count, self.source, self.closed = count, source, 0

    def rows(self, split: Split) -> list[Row]:
        return [{}] * (self.count if split == "validation" else 1)

    def prompt(self, row: Row, index: int) -> Prompt:
        return Prompt(f"q{index}", [{"role": "user", "content": "1 + 1 = ?"}], "2", {"data_source": self.source})

    def close(self) -> None:
        self.closed += 1


def test_the_prompts_of_named_tasks() -> None:
    """Ids are unique, limits are each task's, and the source by which Router chooses stays."""
    own, other = Held(3), Held(5, "openai/gsm8k")
    made = recipe(task=own, validation=Validation(tasks={"own": None, "sums": other}, limit=2))
    found = held_out(made)
    assert [prompt.id for prompt in found] == ["own/q0", "own/q1", "sums/q0", "sums/q1"]
    assert [prompt.source for prompt in found] == ["own"] * 2 + ["sums"] * 2
    assert [prompt.meta["data_source"] for prompt in found] == ["own"] * 2 + ["openai/gsm8k"] * 2
    assert {own, other} <= set(made.parts())
    alone = held_out(recipe(task=own))
    assert [(prompt.id, prompt.source, prompt.meta["data_source"]) for prompt in alone] == [
        (f"q{i}", None, None) for i in range(3)
    ]
    assert held_out(recipe(task=own, validation=None)) == []


def test_no_task_is_refused() -> None:
    with pytest.raises(rlkit.base.errors.RecipeError, match="validation.tasks names no task"):
        check(recipe(validation=Validation(tasks={})))
    for name in ("", "\x1b[2J"):
        with pytest.raises(rlkit.base.errors.RecipeError, match="validation.tasks has the name"):
            rlkit.Recipe("tiny", "Arithmetic", "ExactReward", validation=Validation(tasks={name: None})).yaml()


def test_accuracies_of_other_prompts_are_not_paired() -> None:
    """Places mean the same prompts as long as the tasks are the same; a limit moves those of the second task."""

    def recipe_with(**validation: Any) -> dict[str, Any]:
        return {"task": {"class_path": "GSM8K"}, "validation": validation}

    assert of_recipe(recipe_with(tasks=None, limit=3)) == of_recipe(recipe_with(tasks=None, limit=5))
    tasks = {"a": None, "b": {"class_path": "Arithmetic"}}
    assert of_recipe(recipe_with(tasks=tasks, limit=3)) != of_recipe(recipe_with(tasks=tasks, limit=5))
    assert of_recipe(recipe_with(tasks=tasks)) != of_recipe(recipe_with(tasks={"a": None}))
    assert of_recipe({"task": 1, "validation": None}) == of_recipe({"task": 1})


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    rows = [{"prompt": f"{a} + 1 = ?", "answer": str(a + 1), "data_source": "files"} for a in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_tasks_through_fit_by_a_recipe(tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The metrics of each task are by its name, the answers name it, and the run's recipe has the tasks."""
    own = {"class_path": "Jsonl", "init_args": {"path": str(questions), "validation_path": str(questions)}}
    tasks = {"sums": None, "own": own}
    (tmp_path / "more.yaml").write_text(yaml.safe_dump({"validation": {"tasks": tasks}}, sort_keys=False))
    out = tmp_path / "out"
    fast = [option for option in FAST if "limit" not in option]
    given = ["--recipe=quickstart", f"--recipe={tmp_path / 'more.yaml'}", *fast, "--validation.limit=5"]
    assert main(["recipe", "check", *given]) == 0
    assert "9 validation prompts" in capsys.readouterr().out
    assert main(["fit", *given, f"--out={out}"]) == 0
    result = json.loads((out / "result.json").read_text())["validation"]["after"]
    share = {name: result[f"accuracy/{name}"] for name in ("sums", "own")}
    assert result["accuracy"] == pytest.approx((5 * share["sums"] + 4 * share["own"]) / 9)
    assert "sampled_accuracy/own" in result
    rows = read_jsonl(out / "rollouts" / "validation-after.jsonl.gz")
    assert [row["source"] for row in rows] == (["sums"] * 5 + ["own"] * 4) * 2
    assert rows[5]["prompt"].startswith("own/")
    assert list(yaml.safe_load((out / "recipe.yaml").read_text())["validation"]["tasks"]) == ["sums", "own"]
    assert main(["validate", "--recipe", str(out / "recipe.yaml"), "--json", "--validation.samples=0"]) == 0
    assert "accuracy/own" in json.loads(capsys.readouterr().out.splitlines()[-1])
    assert main(["recipe", "show", str(out / "recipe.yaml"), "--python"]) == 0
    script = capsys.readouterr().out
    assert 'tasks={"sums":None,"own":Jsonl(' in "".join(script.split())


def test_tasks_as_objects(tmp_path: Path) -> None:
    """A part of Python's own is closed at the end of the run, as the recipe's task is."""
    held = Held(3, "elsewhere")
    result = rlkit.fit(
        rlkit.Recipe(
            model="tiny",
            task=Arithmetic(),
            reward="ExactReward",
            rollout={"sampling": {"max_tokens": 8}, "group_size": 2},
            train={"steps": 1, "prompts_per_step": 2},
            fabric={"accelerator": "cpu"},
            validation=Validation(tasks={"held": held, "sums": Arithmetic()}, limit=4, before=False),
        ),
        out=tmp_path / "out",
        quiet=True,
    )
    assert {"accuracy/held", "accuracy/sums"} <= set(result.validation["after"] or {})
    assert held.closed == 1

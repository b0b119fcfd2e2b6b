"""A run without held-out prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rlkit.cli.main import main
from rlkit.commands import parse
from tests.conftest import FAST, read_jsonl

QUESTIONS = [{"prompt": f"{a} + {b} = ?", "answer": str(a + b)} for a in range(3) for b in range(3)]


@pytest.fixture
def questions(tmp_path: Path) -> str:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return str(path)


def test_fit_without_validation(tmp_path: Path, questions: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The engine's proof, the reward's trial and the tables do without held-out prompts; there is no second file."""
    out = tmp_path / "out"
    options = ["--task=Jsonl", f"--task.path={questions}", "--validation.every=1", "--validation=null"]
    assert main(["fit", "--recipe=quickstart", *FAST, *options, f"--out={out}"]) == 0
    printed = capsys.readouterr().out.replace(str(tmp_path), "")
    assert "2 steps of 4 prompts x 4 samples = 16 trajectories, 1 optimizer step each" in printed
    assert "reward: 1 for the reference answer" in printed
    assert "validati" not in printed
    assert json.loads((out / "result.json").read_text())["validation"] == {"before": None, "after": None}
    assert {path.name.partition(".")[0] for path in (out / "rollouts").iterdir()} == {"step-00001", "step-00002"}
    assert not any(name.startswith("validation") for row in read_jsonl(out / "metrics.jsonl") for name in row)
    assert yaml.safe_load((out / "recipe.yaml").read_text())["validation"] is None


def test_the_other_verbs_without_validation(tmp_path: Path, questions: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--recipe=quickstart", "--task=Jsonl", f"--task.path={questions}", "--validation=null"]
    assert main(["recipe", "check", *options]) == 0
    assert "ok: 9 training rows, 0 validation prompts" in capsys.readouterr().out
    assert main(["generate", *options]) == 0
    assert "= ?" in capsys.readouterr().out
    assert main(["data", "prepare", *options, f"--out={tmp_path / 'data'}"]) == 0
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["train.jsonl"]
    assert (main(["data"]), main(["data", "--help"]), main(["data", "fetch"])) == (2, 0, 2)
    assert main(["validate", *options]) == 2
    assert "validation is off" in capsys.readouterr().err


def test_a_split_of_one_file(questions: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--recipe=quickstart", "--task=Jsonl", f"--task.path={questions}"]
    assert main(["recipe", "check", *options]) == 2
    assert "task.validation_split: 0.05" in capsys.readouterr().err
    assert main(["recipe", "check", *options, "--task.validation_split=0.2"]) == 0
    assert "ok: 7 training rows, 2 validation prompts" in capsys.readouterr().out
    assert main(["recipe", "check", "--recipe=quickstart", "--task=Jsonl", f"--task.path=[{questions},{questions}]",
                 "--validation=null"]) == 0  # fmt: skip
    assert "ok: 18 training rows" in capsys.readouterr().out


def test_what_is_null_stays_null_in_the_recipe_that_a_run_keeps(tmp_path: Path) -> None:
    """Its default is something else, so leaving it out would bring that back."""
    parsed = parse("fit", ["--recipe=ppo_gsm8k", "--critic.clip=null", "--validation=null"])
    (tmp_path / "recipe.yaml").write_text(parsed.yaml)
    again = parse("fit", [f"--recipe={tmp_path / 'recipe.yaml'}"])
    assert again.yaml == parsed.yaml
    assert again.recipe.validation is None
    assert again.recipe.critic is not None
    assert again.recipe.critic.clip is None


def test_validations_before_and_after_can_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["recipe", "check", "--recipe=quickstart", "--validation.before=false", "--validation.after=false"]) == 2
    )
    assert "nothing is validated; set one of them, or validation: null" in capsys.readouterr().err
    few = ["--train.steps=2", "--train.prompts_per_step=4", "--validation.limit=4", "--validation.samples=2"]
    ends = ["--validation.before=false", "--validation.after=false", "--validation.every=1"]
    assert main(["fit", "--recipe=quickstart", *few, *ends, f"--out={tmp_path / 'out'}"]) == 0
    assert json.loads((tmp_path / "out" / "result.json").read_text())["validation"] == {"before": None, "after": None}
    first, second = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    assert "validation/accuracy_p_start" not in first
    assert 0 < second["validation/sampled_accuracy_p_start"] <= 1
    assert second["validation/accuracy_low"] <= second["validation/accuracy"] <= second["validation/accuracy_high"]
    assert second["validation/sampled_pass@2"] >= second["validation/sampled_accuracy"]

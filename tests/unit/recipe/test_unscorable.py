"""Rows that a reward cannot score: refused with their count before a run, or left out."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlkit.base.errors import PartError
from rlkit.cli.main import main
from rlkit.interfaces.reward import RewardFunction
from rlkit.recipe.method import ReinforcementLearning, Supervised
from rlkit.recipe.unscorable import unscorable_training
from rlkit.rewards import Composite, ExactReward, MathReward, Router
from rlkit.types import Prompt, Trajectory
from tests.conftest import FAST, read_jsonl

ANSWERS = ("#### 4", "about 7", "\\frac{1}{2}", "She sold 72 clips in 2 months.", "(1, 2)", "17", "3 cm", "\\int x dx")
"""Rows 1, 3 and 7 are in no form."""


def prompt(answer: str | None, source: str = "") -> Prompt:
    return Prompt("p", [{"role": "user", "content": "?"}], answer, {"data_source": source})


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    rows = [json.dumps({"prompt": f"{i} + 2 = ?", "answer": answer}) for i, answer in enumerate(ANSWERS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    return ["--recipe=quickstart", "--task=Jsonl", f"--task.path={tmp_path / 'rows.jsonl'}", "--validation=null"]


@pytest.mark.parametrize("verb", [["recipe", "check"], ["fit"]])
def test_rows_in_no_form_are_refused_with_their_count(
    options: list[str], verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = [] if verb != ["fit"] else [f"--out={tmp_path / 'out'}"]
    assert main([*verb, *options, *out]) == 2
    error = capsys.readouterr().err
    assert "the reward cannot score 3 of 8 prompts (37.50%)" in error
    assert "training row 1 has the answer 'about 7'" in error
    assert "training row 3 has the answer 'She sold 72 clips in 2 months.'" in error
    assert "rollout.unscorable: drop" in error
    assert not (tmp_path / "out").exists()


def test_rows_in_no_form_are_left_out_if_the_recipe_drops_them(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--validation=null",
        "--rollout.unscorable=drop",
        "--train.steps=1",
        "--train.prompts_per_step=5",
        "--rollout.group_size=2",
    ]
    assert main(["fit", *options, *FAST, *words, f"--out={tmp_path / 'out'}"]) == 0
    shown = " ".join("".join(capsys.readouterr()).split())
    assert "cannot score 3 of 8 prompts" in shown
    assert "they are dropped" in shown
    rows = read_jsonl(tmp_path / "out" / "rollouts" / "step-00001.jsonl.gz")
    assert {row["answer"] for row in rows} == {"#### 4", "\\frac{1}{2}", "(1, 2)", "17", "3 cm"}


def test_a_run_without_a_row_that_can_be_scored_is_refused(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "?", "answer": "about 7"}))
    assert main(["recipe", "check", *options, "--rollout.unscorable=drop"]) == 2
    assert "no prompt is left" in capsys.readouterr().err


def test_validation_rows_are_checked_too(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.jsonl").write_text(json.dumps({"prompt": "?", "answer": "7"}))
    words = [f"--task.path={tmp_path / 'good.jsonl'}", f"--task.validation_path={tmp_path / 'rows.jsonl'}"]
    assert main(["validate", *options[:2], *words]) == 2
    assert "cannot score 3 of 9 prompts (33.33%): validation row 1 has" in capsys.readouterr().err


def test_data_verbs_count_and_show_them(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    def output(verb: str, *words: str) -> str:
        assert main(["data", verb, *options, *words]) == 0
        return capsys.readouterr().out

    train: dict[str, Any] = json.loads(output("stats", "--json"))["splits"]["train"]
    assert (train["unscorable"], len(train["unscorable_rows"])) == (3, 3)
    assert "row 1 has the answer 'about 7'" in output("stats")
    shown = json.loads(output("show", "--json"))
    assert [row["unscorable"] is not None for row in shown["rows"]] == [False, False, False]  # rows 0, 2 and 5


def test_rewards_of_rewards_ask_those_that_score_the_prompt() -> None:
    router = Router({"math": MathReward(), "exact": ExactReward()}, default="exact")
    assert "in no form" in (router.unscorable(prompt("about 7", "math")) or "")
    assert router.unscorable(prompt("about 7", "words")) is None
    assert Router({"math": MathReward()}).unscorable(prompt("about 7", "words")) is None
    assert "in no form" in (Composite({"a": ExactReward(), "b": router}).unscorable(prompt("about 7", "math")) or "")
    assert "no answer" in (MathReward().unscorable(prompt(None)) or "")


class Odd(RewardFunction):
    """A reward whose reason is no text."""

    def grade(self, trajectory: Trajectory) -> float:
        return 0.0

    def unscorable(self, prompt: Prompt) -> str | None:
        return 7  # type: ignore[return-value]


def test_a_reason_that_is_no_text_names_the_reward() -> None:
    recipe: Any = SimpleNamespace(reward=Odd(), method=ReinforcementLearning())
    with pytest.raises(PartError, match="`unscorable` returned 7"):
        unscorable_training(recipe, [prompt("1")])
    recipe.method = Supervised()
    assert unscorable_training(recipe, [prompt("1")]) == {}

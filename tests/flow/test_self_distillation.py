"""A policy that can use an answer in its context learns to do without it, from itself alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.self_distill import HINT, fit, self_distillation, use_of_hints

FEEDBACK = """
def score(text, answer):
    right = float(text == f"#### {answer}")
    return {"reward": right, "accuracy": right, "feedback": None if right else f"The answer is {answer}."}
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that can use an answer in its context."""
    folder = tmp_path_factory.mktemp("hints") / "start"
    use_of_hints(folder, "--train.steps=100", "--train.prompts_per_step=32", "--validation=null")
    return folder


@pytest.mark.slow
def test_a_policy_learns_from_feedback_on_its_samples(tmp_path: Path, start: Path) -> None:
    """SDPO: only failed samples have feedback, which says what would have been right."""
    (tmp_path / "reward.py").write_text(FEEDBACK, encoding="utf-8")
    reward = {
        "class_path": "PythonReward",
        "init_args": {"function": f"{tmp_path}/reward.py:score", "allow_code": True},
    }
    attempts = {"solution": None, "feedback": "\n{text}"}
    teacher = {"path": None, "context": "{prompt}{feedback}", "attempts": attempts}
    parts = (f"--reward={json.dumps(reward)}", f"--teacher={json.dumps(teacher)}", "--loss=Distillation")
    words = ("--train.steps=20", "--train.lr=3e-4", "--validation.samples=0")
    result = fit("quick_distill", tmp_path / "taught", f"--model.path={start}", *parts, *words)
    assert result["after"]["accuracy_low"] > result["before"]["accuracy_high"]


@pytest.mark.slow
def test_a_policy_learns_from_itself_with_the_answer(tmp_path: Path, start: Path) -> None:
    """Greedy accuracy on 200 held-out additions, which it is never shown the answers of."""
    words = ("--train.steps=40", "--validation.samples=0")
    found = self_distillation(start, tmp_path / "taught", "{prompt}" + HINT, *words)
    before, after = found["before"], found["after"]
    assert after["accuracy_low"] > before["accuracy_high"]

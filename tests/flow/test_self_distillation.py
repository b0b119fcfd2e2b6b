"""A policy that can use an answer in its context learns to do without it, from itself alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.self_distill import HINT, self_distillation, use_of_hints


@pytest.mark.slow
def test_a_policy_learns_from_itself_with_the_answer(tmp_path: Path) -> None:
    """Greedy accuracy on 200 held-out additions, which it is never shown the answers of."""
    start = tmp_path / "start"
    use_of_hints(start, "--train.steps=100", "--train.prompts_per_step=32", "--validation=null")
    words = ("--train.steps=40", "--validation.samples=0")
    found = self_distillation(start, tmp_path / "taught", "{prompt}" + HINT, *words)
    before, after = found["before"], found["after"]
    assert after["accuracy_low"] > before["accuracy_high"]

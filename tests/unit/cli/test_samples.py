"""Completions that a run prints: when they are due, and that a policy's text stays text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlkit.cli.display import Display
from rlkit.cli.main import main
from rlkit.cli.samples import differing_prompts, sample_text
from rlkit.types import Prompt, Score, StopReason, Trajectory, Turn
from tests.conftest import read_jsonl


def sample(text: str, asked: object = "What is 1 + 1?", reward: float | None = 0.5, group: int = 0) -> Trajectory:
    prompt = Prompt("1", [{"role": "user", "content": asked}])
    turns = [Turn("user", 0, 2), Turn("assistant", 2, 4)]
    mask, score = [False, False, True, True], None if reward is None else Score(reward)
    return Trajectory(prompt, group, [1] * 4, mask, [0.0] * 4, [0] * 4, StopReason.STOP, turns, text, score=score)


def test_a_sample_has_the_prompts_end_and_its_reward() -> None:
    assert sample_text(sample("2", f"{'x' * 300} What is 1 + 1?")).splitlines() == [
        f"  prompt     | …{'x' * 185} What is 1 + 1?",
        "  completion | 2",
        "  reward 0.5, 2 tokens, ended by stop",
    ]
    assert "completion | " in sample_text(sample("", [{"type": "image", "image": "x"}], reward=None))
    assert "[picture]" in sample_text(sample("", [{"type": "image", "image": "x"}]))


def test_a_long_completion_loses_its_middle() -> None:
    lines = sample_text(sample("\n".join(map(str, range(100))))).splitlines()
    assert [line.partition("| ")[2] for line in lines[1:-1]] == ["0", "1", "2", "3", "…", "96", "97", "98", "99"]
    assert len(sample_text(sample("y" * 10_000))) < 800


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_policys_text_cannot_act_on_a_terminal(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Escape codes are written out, and no line begins as rlkit's own do, whatever breaks it."""
    monkeypatch.setattr("rlkit.cli.display._on_terminal", lambda: is_terminal)
    monkeypatch.setenv("TERM", "dumb")
    hostile = "\x1b[2J\x1b]0;title\x07\r\rwarning: a\nwarning: b\x0bwarning: c\u2028warning: d\x9b3[red]e[/red]\u202ef"
    Display(4, 1).samples(1, [sample(hostile, hostile)])
    out = capsys.readouterr().out
    assert not set(out) & set("\x1b\x07\r\x0b\u2028\x9b\u202e")
    assert "[red]e[/red]" in out
    assert not [line for line in out.splitlines() if line.startswith("warning")]


@pytest.mark.parametrize(
    ("every", "is_terminal", "expected"),
    [(None, True, [1, 11, 21]), (None, False, []), (0, True, []), (15, True, [1, 16]), (15, False, [1, 16])],
)
def test_samples_are_shown_every_n_steps(
    every: int | None,
    is_terminal: bool,
    expected: list[int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlkit.cli.display._on_terminal", lambda: is_terminal)
    monkeypatch.setenv("TERM", "dumb")
    display = Display(25, every)
    for step in range(1, 26):
        display.samples(step, [sample("2")])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("a sample")] == [f"a sample of step {n}:" for n in expected]


def test_samples_of_different_prompts_are_chosen() -> None:
    rows = [sample("a", reward=None), sample("b"), sample("c"), sample("d", group=1), sample("e", group=2)]
    assert [row.text for row in differing_prompts(rows, 2)] == ["b", "d"]
    assert differing_prompts([], 2) == []


def test_a_run_whose_rewards_are_all_0_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five steps of two prompts with two samples each."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nothing.py").write_text("def score(completion, **columns):\n    return 0.0\n")
    reward = ("--reward=PythonReward", "--reward.function=nothing.py:score", "--reward.allow_code=true")
    small = ("--train.steps=5", "--train.prompts_per_step=2", "--rollout.group_size=2", "--validation=null")
    assert main(["fit", "--recipe=quickstart", *reward, *small, "--log.samples=4", "--out=run"]) == 0
    out = capsys.readouterr().out
    problem = "reward 0 in all 20 samples of 5 steps, so there is nothing to learn: read some completions"
    assert out.count(f"warning: {problem}") == 1
    assert [line for line in out.splitlines() if "a sample" in line] == [f"a sample of step {n}:" for n in (1, 5, 5, 5)]
    assert "easier or harder" not in out
    assert "rlkit export" not in out
    assert out.splitlines()[-1].endswith("what may be wrong: rlkit docs why-it-does-not-learn")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["diagnosis"].startswith(problem)
    assert result["training_reward"]["last"] == {"mean": 0.0, "low": 0.0, "high": 0.0, "steps": 2}
    row = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    assert (row["reward/min"], row["reward/max"]) == (0.0, 0.0)

"""Signs that a policy exploits its reward: the metrics of a step, worked by hand, and the warnings, each shown once."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlkit.cli.main import main
from rlkit.run.preflight import reward_checks
from rlkit.run.preflight.reward_checks import LENGTH_STEPS, TRUNCATED_STEPS, RewardChecks
from rlkit.train.metrics import MEASURED_COMPLETIONS, Meter, describe_texts
from rlkit.types import Prompt, Score, StopReason, Trajectory, Turn
from tests.conftest import read_jsonl

PROMPT = Prompt("p", [{"role": "user", "content": "?"}])
ONE: Any = SimpleNamespace(gather_dp=lambda value: [value], broadcast_tp=lambda value: value)


def trajectory(
    length: int,
    reward: float | None,
    group: int = 0,
    stop: StopReason = StopReason.STOP,
    answer: list[int] | None = None,
) -> Trajectory:
    tokens = [9, *(answer or range(length))]
    size = len(tokens)
    return Trajectory(
        PROMPT, group, tokens, [False] + [True] * (size - 1), [0.0] * size, [0] * size, stop,
        [Turn("user", 0, 1), Turn("assistant", 1, size)], score=Score(reward),
    )  # fmt: skip


def metrics(*trajectories: Trajectory, grouped: bool = True) -> dict[str, float]:
    meter = Meter()
    describe_texts(trajectories, grouped, meter)
    return meter.result(ONE)


def test_length_and_reward_are_compared_within_each_prompt() -> None:
    """About their means: lengths -1, 1 and -2, 2, rewards 1, -1 and -1, 1; so (-2 + 4) / sqrt(10 * 4).

    Over all, lengths 1, 3, 10, 14 and rewards 3, 1, 5, 7 go together: a harder prompt has longer answers.
    """
    rows = [trajectory(1, 3.0), trajectory(3, 1.0), trajectory(10, 5.0, 1), trajectory(14, 7.0, 1)]
    assert metrics(*rows)["reward/length_correlation"] == pytest.approx(2 / math.sqrt(40))
    assert metrics(*rows, grouped=False)["reward/length_correlation"] == pytest.approx(42 / math.sqrt(110 * 20))


@pytest.mark.parametrize("rewards", [(0.1, 0.1, 0.1), (0.0, 0.0, 0.0), (None, None, 1.0)])
def test_where_rewards_are_equal_there_is_no_correlation(rewards: tuple[float | None, ...]) -> None:
    measured = metrics(*(trajectory(length, reward) for length, reward in zip((3, 5, 6), rewards, strict=True)))
    assert "reward/length_correlation" not in measured


def test_truncated_completions_are_told_from_finished_ones() -> None:
    """Of five, two were cut off by the limit of tokens or the context; one ended by its number of turns."""
    stops = {StopReason.STOP: 1.0, StopReason.LENGTH: 0.5, StopReason.CONTEXT: 0.0, StopReason.TURNS: 9.0}
    measured = metrics(*(trajectory(4, reward, stop=stop) for stop, reward in stops.items()), trajectory(4, 0.0))
    assert measured["rollout/truncated"] == 2 / 5
    assert (measured["rollout/reward_truncated"], measured["rollout/reward_finished"]) == (0.25, 0.5)


def test_repetitions_are_counted_within_each_turn_of_the_policy() -> None:
    """1 1 1 1 1 has the same run twice; 1 2 3 4 has one run; an answer of three tokens has none and does not count."""
    measured = metrics(*(trajectory(0, 0.0, answer=answer) for answer in ([1] * 5, [1, 2, 3, 4], [7, 7, 7])))
    assert measured["rollout/repetition"] == (1 / 2 + 0) / 2
    twice = trajectory(0, 0.0, answer=[1, 2, 3, 4, 8, 1, 2, 3, 4])
    twice.turns = [Turn("user", 0, 1), Turn("assistant", 1, 5), Turn("tool", 5, 6), Turn("assistant", 6, 10)]
    assert metrics(twice)["rollout/repetition"] == 0
    assert "rollout/repetition" not in metrics(trajectory(3, 0.0))
    assert metrics() == {}


def test_many_answers_are_looked_through_in_part() -> None:
    """Every second one of 2 * MEASURED_COMPLETIONS, which all repeat themselves; the others do not."""
    answers = [[1] * 5, [1, 2, 3, 4, 5]] * MEASURED_COMPLETIONS
    assert metrics(*(trajectory(0, 0.0, answer=answer) for answer in answers))["rollout/repetition"] == 0.5


def test_ranks_agree_on_the_metrics_of_all() -> None:
    groups = [[trajectory(1, 3.0), trajectory(3, 1.0)], [trajectory(10, 5.0, 1), trajectory(14, 7.0, 1)]]
    meters = [Meter(), Meter()]
    for meter, group in zip(meters, groups, strict=True):
        describe_texts(group, True, meter)
    ranks: Any = SimpleNamespace(gather_dp=lambda value: meters, broadcast_tp=lambda value: value)
    assert Meter().result(ranks) == pytest.approx(metrics(*groups[0], *groups[1]))


def see(checks: RewardChecks, steps: int, **metrics: float) -> list[str]:
    names = {name.replace("__", "/"): value for name, value in metrics.items()}
    return [warning for _ in range(steps) for warning in checks.see(names)]


def test_length_that_pays_is_warned_of_once_and_after_many_steps() -> None:
    checks = RewardChecks()
    assert see(checks, LENGTH_STEPS - 1, reward__length_correlation=0.6) == []
    [warning] = see(checks, 3, reward__length_correlation=0.6)
    assert "in 50 steps longer completions earned more (correlation of length and reward 0.60)" in warning
    assert see(checks, 99, reward__length_correlation=0.9) == []


@pytest.mark.parametrize("correlation", [0.49, -0.9])
def test_length_that_hardly_pays_or_costs_is_no_sign(correlation: float) -> None:
    assert see(RewardChecks(), 99, reward__length_correlation=correlation) == []


def test_length_that_pays_is_right_where_validation_improves() -> None:
    checks = RewardChecks()
    checks.validated({"accuracy": 0.5})
    see(checks, LENGTH_STEPS - 1, reward__length_correlation=0.8)
    checks.validated({"accuracy": 0.6})
    assert see(checks, 9, reward__length_correlation=0.8) == []
    for _ in range(2):
        checks.validated({"accuracy": 0.5})
    assert len(see(checks, 1, reward__length_correlation=0.8)) == 1


CUT = {"rollout__truncated": 0.2, "rollout__reward_truncated": 0.6, "rollout__reward_finished": 0.5, "reward__std": 0.3}


def test_cut_off_answers_that_earn_as_much_are_warned_of() -> None:
    checks = RewardChecks()
    assert see(checks, TRUNCATED_STEPS - 1, **CUT) == []
    [warning] = see(checks, 9, **CUT)
    assert "20% of the completions were truncated" in warning
    assert "earned as much (0.600) as those that ended (0.500)" in warning


@pytest.mark.parametrize(
    "changes",
    [{"rollout__truncated": 0.05}, {"rollout__reward_truncated": 0.4}, {"reward__std": 0.0}],
    ids=["few", "less", "all earn nothing"],
)
def test_cut_off_answers_that_are_few_or_earn_less_are_no_sign(changes: dict[str, float]) -> None:
    assert see(RewardChecks(), 99, **CUT | changes) == []


def rising(accuracies: list[float], rewards: list[float], spread: float = 0.4, before: bool = True) -> list[str]:
    """Validations with six steps before each, whose rewards differ by a hundredth."""
    checks, measured = RewardChecks(), []
    if before:
        checks.validated({"accuracy": accuracies.pop(0)})
    for accuracy, reward in zip(accuracies, rewards, strict=True):
        for i in range(6):
            measured += see(checks, 1, reward__mean=reward + i % 2 / 100, reward__std=spread)
        checks.validated({"accuracy": accuracy})
    return measured + see(checks, 3, reward__mean=rewards[-1], reward__std=spread)


def test_a_reward_that_rises_without_accuracy_is_warned_of() -> None:
    [warning] = rising([0.5, 0.5, 0.45, 0.5], [0.2, 0.3, 0.6])
    assert "the training reward rose from 0.205 to 0.605, but validation accuracy did not (0.500 at first" in warning
    assert len(rising([0.5, 0.45, 0.5], [0.2, 0.3, 0.6], before=False)) == 1


@pytest.mark.parametrize(
    ("accuracies", "rewards", "spread"),
    [
        ([0.5, 0.5, 0.55, 0.5], [0.2, 0.3, 0.6], 0.4),  # it rises
        ([0.97, 0.97, 0.96, 0.97], [0.2, 0.3, 0.6], 0.4),  # it cannot rise
        ([0.5, 0.5, 0.5, 0.5], [0.2, 0.2, 0.205], 0.4),  # within the noise of steps
        ([0.5, 0.5, 0.5, 0.5], [0.2, 0.3, 0.6], 4.0),  # a tenth of the spread of a prompt's samples
        ([0.5, 0.5, 0.5, 0.5], [0.6, 0.3, 0.2], 0.4),  # it falls
        ([0.5, 0.5, 0.5], [0.2, 0.6], 0.4),  # too few validations
    ],
)
def test_a_reward_that_rises_by_chance_is_no_sign(accuracies: list[float], rewards: list[float], spread: float) -> None:
    assert rising(accuracies, rewards, spread) == []


def test_metrics_that_are_missing_are_no_sign() -> None:
    """As in steps whose conversations all failed, and with rewards that measure no accuracy."""
    checks = RewardChecks()
    checks.validated({"reward": 1.0})
    assert see(checks, 99) == []


LONGEST = "def longest(trajectory):\n    return trajectory.response_length / 10\n"


def test_a_reward_for_length_is_warned_of_by_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through `rlkit fit`: the reward is the length, most answers are cut off, and the metrics are in metrics.jsonl."""
    monkeypatch.setattr(reward_checks, "LENGTH_STEPS", 2)
    monkeypatch.setattr(reward_checks, "TRUNCATED_STEPS", 2)
    (tmp_path / "mine.py").write_text(LONGEST)
    options = (
        "--recipe=quickstart", "--reward=PythonReward", f"--reward.function={tmp_path / 'mine.py'}:longest",
        "--reward.allow_code=true", "--validation=null", "--train.steps=4", "--train.prompts_per_step=4",
        "--rollout.sampling.max_tokens=9", "--rollout.sampling.temperature=2", "--train.require_reward=false",
        f"--out={tmp_path / 'out'}",
    )  # fmt: skip
    assert main(["fit", *options]) == 0
    rows = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    assert all(row["reward/length_correlation"] == pytest.approx(1) for row in rows)
    assert all(0 < row["rollout/truncated"] < 1 and 0 <= row["rollout/repetition"] <= 1 for row in rows)
    assert all(row["rollout/reward_truncated"] == pytest.approx(0.9) for row in rows)
    printed = " ".join(capsys.readouterr().out.split())
    while_it_ran, _, at_the_end = printed.partition("warnings in this run:")
    for warning in ("longer completions earned more", "truncated by the limit of tokens, and earned as much (0.900)"):
        assert while_it_ran.count(warning) == 1
        assert at_the_end.count(warning) == 1

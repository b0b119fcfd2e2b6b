"""Metrics that look wrong are warned of, once, with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlkit.cli.main import main
from rlkit.commands import parse
from rlkit.recipe import Recipe
from rlkit.run.alarms import Alarms


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return parse("fit", ["--recipe=quickstart"]).recipe


def with_options(*options: str) -> Recipe:
    return parse("fit", ["--recipe=quickstart", *options]).recipe


def see(alarms: Alarms, steps: int, **metrics: float) -> list[str]:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return [warning for _ in range(steps) for warning in alarms.see(named)]


def test_a_gap_is_told_after_five_steps_and_once(recipe: Recipe) -> None:
    alarms = Alarms(recipe)
    assert see(alarms, 4, mismatch__k3=0.02) == []
    [warning] = see(alarms, 1, mismatch__k3=0.02)
    assert warning.startswith("warning: engine and trainer are 0.02 nats a token apart (mismatch/k3, mean of 5 steps")
    assert "correction: {high: 2.0}" in warning
    assert see(alarms, 9, mismatch__k3=9.0) == []


def test_a_gap_that_is_corrected_is_told_without_the_correction() -> None:
    [warning] = see(Alarms(with_options("--correction.high=2.0")), 5, mismatch__k3=0.011)
    assert "correction: {high: 2.0}" not in warning
    assert "compute rollouts in the trainer's precision" in warning


@pytest.mark.parametrize("gap", [1e-7, 0.001, 0.01, float("nan")])
def test_a_gap_as_bfloat16_has_it_is_none(recipe: Recipe, gap: float) -> None:
    assert see(Alarms(recipe), 50, mismatch__k3=gap) == []


def test_answers_that_are_cut_off(recipe: Recipe) -> None:
    """Of ten steps, half of the answers: not yet; 0.6 then makes 0.51."""
    alarms = Alarms(recipe)
    assert see(alarms, 10, rollout__truncated=0.5) == []
    [warning] = see(alarms, 1, rollout__truncated=0.6)
    assert "51% of the completions of 10 steps were truncated" in warning
    assert "raise rollout.sampling.max_tokens" in warning


def test_groups_without_signal_name_the_reward(recipe: Recipe) -> None:
    [warning] = see(Alarms(recipe), 10, groups__no_signal=0.9, reward__mean=0.02)
    assert (
        "in 90% of the groups of 10 steps all samples earned the same (groups/no_signal), with a mean reward of 0.02"
        in (warning)
    )
    assert "curriculum: SuccessRate" in warning


def test_groups_of_one_and_critics_need_no_spread() -> None:
    assert see(Alarms(with_options("--advantage=GAE", "--critic.path=null")), 30, groups__no_signal=1.0) == []
    assert see(Alarms(with_options("--advantage=ReMax")), 30, groups__no_signal=1.0) == []
    assert see(Alarms(with_options("--advantage=null", "--loss=KTO")), 30, groups__no_signal=1.0) == []


def test_pairs_of_the_data_without_signal_are_left_out_of_it() -> None:
    recorded = parse("fit", ["--recipe=quick_dpo"]).recipe
    [warning] = see(Alarms(recorded), 10, groups__no_signal=0.9)
    assert warning.endswith("taught nothing: remove prompts whose answers have equal rewards from the data")


@pytest.mark.parametrize(("accuracy", "count"), [(0.2, 1), (0.4, 1), (0.69, 1), (0.75, 0), (1.0, 0)])
def test_entropy_that_collapses_matters_where_answers_stay_wrong(recipe: Recipe, accuracy: float, count: int) -> None:
    """From 1.0 to 0.1: the mean of the last ten is below 0.2 in the end. At first 0.6 of the answers are wrong."""
    alarms = Alarms(recipe)
    assert see(alarms, 5, policy__entropy=1.0, accuracy=0.4) == []
    warnings = see(alarms, 20, policy__entropy=0.1, accuracy=accuracy)
    assert len(warnings) == count
    assert all("entropy fell from 1 to 0.1" in text for text in warnings)


def test_entropy_collapses_without_an_accuracy_too(recipe: Recipe) -> None:
    alarms = Alarms(recipe)
    assert see(alarms, 5, policy__entropy=1.0) == []
    assert len(see(alarms, 10, policy__entropy=0.05)) == 1


def test_entropy_that_was_always_low_or_falls_slowly_is_none(recipe: Recipe) -> None:
    assert see(Alarms(recipe), 99, policy__entropy=0.0) == []
    alarms = Alarms(recipe)
    assert [warning for n in range(60) for warning in see(alarms, 1, policy__entropy=1.0 - n / 80)] == []


def test_a_run_shows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers of one token never end."""
    few = ("--train.steps=11", "--train.prompts_per_step=2", "--rollout.group_size=2", "--validation=null")
    status = main(["fit", "--recipe=quickstart", *few, "--rollout.sampling.max_tokens=1", f"--out={tmp_path / 'out'}"])
    assert status == 0
    printed = capsys.readouterr().out
    assert printed.count("warning: 100% of the completions of 10 steps were truncated by the limit of tokens") == 1

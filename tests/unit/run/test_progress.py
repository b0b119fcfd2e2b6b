"""Steps that teach nothing: counted, explained, and ended after three in a row."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from rlkit.base.errors import TrainingError
from rlkit.commands import parse
from rlkit.recipe import Recipe
from rlkit.run.progress import Progress

GOOD = {"update/steps": 1.0, "advantage/abs_mean": 0.5, "rollout/samples": 16.0}
EQUAL = GOOD | {"advantage/abs_mean": 0.0}
NO_REWARD = {"update/empty": 1.0, "reward/failed": 16.0, "rollout/samples": 16.0}
NOT_FINITE = {"update/steps": 0.0, "update/not_finite": 1.0, "rollout/samples": 16.0}
ALL_DROPPED = {"update/empty": 1.0, "filter/dropped": 1.0, "rollout/samples": 16.0}


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return parse("fit", ["--recipe=quickstart"]).recipe


def see(progress: Progress, *steps: dict[str, float], errors: tuple[str, ...] = ()) -> list[str]:
    return [warning for n, metrics in enumerate(steps, 1) for warning in progress.see(n, metrics, Counter(errors))]


@pytest.mark.parametrize(
    ("metrics", "errors", "expected"),
    [
        (
            NO_REWARD,
            ("KeyError: 'x'",) * 2 + ("other",),
            "reward MathReward failed on 16 of 16 samples; 2 times: KeyErr",
        ),
        (NOT_FINITE, (), "no gradient was finite; .* lower train.lr"),
        (NOT_FINITE | {"advantage/not_finite": 30.0}, (), "advantage GRPO returned 30 NaN or infinite values"),
        (
            {"rollout/failed": 16.0, "rollout/samples": 16.0},
            ("no engine",),
            "16 of 16 conversations failed; 1 time: no e",
        ),
        ({"rollout/samples": 0.0}, (), "none of its prompts fits the model's context"),
    ],
)
def test_three_in_a_row_end_the_run_with_the_cause(
    metrics: dict[str, float], errors: tuple[str, ...], expected: str, recipe: Recipe
) -> None:
    progress = Progress(recipe)
    assert len(see(progress, metrics, metrics, errors=errors)) == 2
    with pytest.raises(TrainingError, match=f"3 steps in a row, up to step 7, taught nothing: {expected}.*3 times"):
        list(progress.see(7, metrics, Counter(errors)))


def test_a_success_between_starts_the_count_anew(recipe: Recipe) -> None:
    progress = Progress(recipe)
    see(progress, NOT_FINITE, NOT_FINITE, GOOD, NO_REWARD, NOT_FINITE)
    assert progress.stalled == 2
    with pytest.raises(TrainingError):
        see(progress, NO_REWARD)


@pytest.mark.parametrize("quiet", [EQUAL, ALL_DROPPED])
def test_equal_rewards_are_warned_of_after_five_steps(quiet: dict[str, float], recipe: Recipe) -> None:
    progress = Progress(recipe)
    assert see(progress, *[quiet] * 4) == []
    [warning] = see(progress, quiet)
    assert "5 steps in a row" in warning
    assert "raise rollout.group_size" in warning
    assert see(progress, *[quiet] * 20) == []
    assert progress.stalled == 0
    see(progress, GOOD, *[quiet] * 4)
    assert progress.without_signal == 4


def test_a_step_without_pairs_is_no_error_unless_some_failed() -> None:
    """A loss of pairs has none where all answers to each prompt have equal rewards."""
    empty = {"update/empty": 1.0, "groups/no_signal": 1.0, "rollout/samples": 16.0}
    progress = Progress(parse("fit", ["--recipe=quick_dpo"]).recipe)
    [warning] = see(progress, *[empty] * 5)
    assert "5 steps in a row" in warning
    assert warning.endswith("remove prompts whose answers have equal rewards from the data")
    assert progress.stalls(1, empty | {"reward/failed": 4.0})
    assert progress.stalls(1, empty | {"update/not_finite": 1.0})
    assert Progress(parse("fit", ["--recipe=quick_sft"]).recipe).stalls(1, empty)


def test_steps_without_comparisons_have_a_signal() -> None:
    kto = parse("fit", ["--recipe=quick_dpo", "--loss=KTO", "--train.max_steps_without_signal=1"]).recipe
    assert see(Progress(kto), *[{"update/steps": 1.0, "groups/no_signal": 1.0}] * 20) == []


def test_steps_without_signal_may_be_limited(recipe: Recipe) -> None:
    limited = replace(recipe, train=replace(recipe.train, max_steps_without_signal=2))
    progress = Progress(limited)
    see(progress, EQUAL, GOOD, EQUAL)
    with pytest.raises(TrainingError, match="2 steps in a row.*train.max_steps_without_signal is 2"):
        see(progress, EQUAL)


def test_while_the_critic_learns_alone_its_steps_count(recipe: Recipe) -> None:
    options = ["--recipe=quick_ppo", "--critic.policy_delay_steps=2"]
    progress = Progress(parse("fit", options).recipe)
    alone: dict[str, Any] = {"critic/steps": 1.0, "advantage/abs_mean": 0.5}
    assert not progress.stalls(2, alone)
    assert progress.stalls(3, alone)


def test_failures_beside_a_good_step_are_shown_once(recipe: Recipe) -> None:
    """Five different errors are shown in a run, the most frequent ones first."""
    progress = Progress(recipe)
    assert not progress.failed(GOOD)
    failing = GOOD | {"rollout/failed": 2.0}
    assert progress.failed(failing)
    assert progress.failed(GOOD | {"reward/failed": 1.0})
    assert see(progress, failing, failing, errors=("a", "b", "b")) == [
        "warning: step 1 left out what failed; 2 times: b",
        "warning: step 1 left out what failed; 1 time: a",
    ]
    assert len(see(progress, failing, errors=("c", "d", "e", "f", "a"))) == 3
    assert see(progress, failing, errors=("g",)) == []

"""What the rewards of a run's samples tell: that there is nothing to learn, and how their mean has changed."""

from __future__ import annotations

import pytest

from rlkit.records.lines import nine_digits
from rlkit.records.rewards import RewardHistory, advice_on_prompts


def history(steps: int, low: float, high: float, accuracy: float | None = None) -> RewardHistory:
    """Return the history of steps of 128 samples, of which 28 have no reward."""
    rewards = RewardHistory()
    metrics = {"reward/mean": (low + high) / 2, "reward/min": low, "reward/max": high, "rollout/samples": 128.0}
    metrics |= {"rollout/failed": 20.0, "reward/failed": 3.0, "reward/no_opinion": 5.0}
    for _ in range(steps):
        rewards.see(metrics | ({} if accuracy is None else {"accuracy": accuracy}))
    return rewards


@pytest.mark.parametrize(
    ("reward", "accuracy", "remedy"),
    [
        (0.0, None, "if they are right, the reward does not extract their answers; if they are wrong, choose easier"),
        (0.1, 0.0, "choose easier prompts or a stronger model"),
        (1.0, None, "nothing to learn: choose harder prompts"),
        (0.9, 1.0, "nothing to learn: choose harder prompts"),
        (0.1, None, "nothing to learn: choose a reward that tells completions apart"),
        (5.0, None, "nothing to learn: choose a reward that tells completions apart"),
    ],
)
def test_equal_rewards_are_counted_with_what_to_do(reward: float, accuracy: float | None, remedy: str) -> None:
    assert history(4, reward, reward, accuracy).problem() is None
    problem = history(5, reward, reward, accuracy).problem() or ""
    assert problem.startswith(f"reward {reward:g} in all 500 samples of 5 steps, so there is nothing to learn: ")
    assert remedy in problem
    assert "easier or harder" not in problem


def test_rounding_errors_of_sums_are_no_difference() -> None:
    problem = history(5, -5.6e-17, 0.1 + 0.2 - 0.3).problem() or ""
    assert problem.startswith("reward 0 in all 500 samples of 5 steps")


@pytest.mark.parametrize("reward", [4 / 3, 12.345678329467773, 1e9 / 7, 0.1 + 0.2])
def test_equal_rewards_before_and_after_a_resume_are_no_difference(reward: float) -> None:
    """Those before it are read from `metrics.jsonl`, which has 9 digits of them."""
    rewards = history(3, nine_digits(reward), nine_digits(reward))
    rewards.see({"reward/mean": reward, "reward/min": reward, "reward/max": reward, "rollout/samples": 128.0})
    assert (rewards.problem(is_over=True) or "").startswith(f"reward {reward:g} in all 428 samples of 4 steps")


def test_a_reward_without_an_opinion_teaches_nothing() -> None:
    rewards = RewardHistory()
    for step in range(5):
        assert (rewards.problem(is_over=True) is None) == (step == 0)
        assert rewards.problem() is None
        rewards.see({"rollout/samples": 128.0, "reward/no_opinion": 128.0})
    assert rewards.problem() == "no opinion in all samples of 5 steps: the reward must return numbers"
    rewards.see({"reward/mean": 0.5, "reward/min": 0.0, "reward/max": 1.0, "rollout/samples": 128.0})
    assert rewards.problem(is_over=True) is None


def test_at_the_end_a_single_step_tells() -> None:
    assert "in all 100 samples of 1 step, so" in (history(1, 0.0, 0.0).problem(is_over=True) or "")
    assert RewardHistory().problem(is_over=True) is None


def test_nothing_right_is_told_where_rewards_differ() -> None:
    assert history(19, 0.0, 0.2, accuracy=0.0).problem() is None
    problem = history(20, 0.0, 0.2, accuracy=0.0).problem() or ""
    assert problem.startswith("accuracy 0 in all 2,000 samples of 20 steps, although rewards differ (0 to 0.2): read")
    assert history(99, 0.0, 0.2, accuracy=0.001).problem(is_over=True) is None


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1e300])
def test_numbers_that_no_run_logs_count_for_nothing(number: float) -> None:
    rewards = history(3, 0.0, 0.0)
    for name in ("reward/mean", "reward/max", "rollout/samples", "accuracy"):
        rewards.see({"reward/mean": 0.5, "reward/min": 0.0, name: number})
    assert (rewards.steps, rewards.samples) == (3, 300)


def test_prompts_are_judged_by_scores_from_0_to_1() -> None:
    advice = [advice_on_prompts(score) for score in (None, -1.0, 0.0, 0.2, 0.5, 0.8, 1.0, 5.0)]
    easier, harder = "choose easier prompts, ", "choose harder prompts, "
    assert advice == ["", "", easier, easier, "", harder, harder, ""]


def test_one_other_reward_is_enough() -> None:
    rewards = history(9, 0.0, 0.0)
    rewards.see({"reward/mean": 0.01, "reward/min": 0.0, "reward/max": 1.0, "rollout/samples": 100.0})
    assert rewards.problem(is_over=True) is None


def test_steps_of_an_earlier_version_claim_nothing() -> None:
    rewards = RewardHistory()
    for _ in range(9):
        rewards.see({"reward/mean": 0.0, "rollout/samples": 8.0})
        rewards.see({"policy/loss": 0.0})
    assert rewards.steps == 9
    assert rewards.problem(is_over=True) is None


def test_the_first_and_the_last_steps_have_intervals() -> None:
    """0, 1, 0, 1 have the variance 1/3, so that the half of the interval is 1.96 / sqrt(12) = 0.5658."""
    rewards = RewardHistory()
    for mean in (0, 1, 0, 1, 5, 2, 3, 2, 3):
        rewards.see({"reward/mean": float(mean)})
    change = rewards.change()
    assert change is not None
    bounds = {"low": pytest.approx(0.5 - 0.5658, abs=1e-4), "high": pytest.approx(0.5 + 0.5658, abs=1e-4)}
    assert change["first"] == {"mean": 0.5, "steps": 4, **bounds}
    assert (change["last"]["mean"], change["last"]["steps"]) == (2.5, 4)
    assert RewardHistory().change() is None


def test_long_runs_compare_twenty_steps() -> None:
    rewards = RewardHistory()
    for step in range(100):
        rewards.see({"reward/mean": float(step)})
    change = rewards.change()
    assert change is not None
    assert (change["first"]["mean"], change["last"]["mean"], change["last"]["steps"]) == (9.5, 89.5, 20)

"""The built-in estimator, loss and rewards, in numbers worked by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlkit_math.answers import equal, final_answer

from rlkit.advantages import GRPO
from rlkit.base.ranges import outside
from rlkit.losses import ClipLoss
from rlkit.rewards import ExactReward, MathReward
from rlkit.testing import check_advantage, check_loss, check_reward, example_batch, example_trajectory
from rlkit.types import PolicyOutput


@given(st.floats(-1e3, 1e3, width=32), st.integers(1, 9))
def test_grpo_of_equal_rewards_is_zero(reward: float, size: int) -> None:
    batch = example_batch([reward] * size, [0] * size)
    GRPO(eps=1e-12).estimate(batch)
    assert batch.advantages is not None
    assert not batch.advantages.any()


def test_grpo_keeps_the_contract() -> None:
    check_advantage(GRPO())


def test_clip_loss_without_dual_clip_is_unbounded_below() -> None:
    batch = example_batch([1.0], [0])
    assert batch.old_logps is not None
    batch.advantages = -batch.mask.float()
    out = ClipLoss(clip_high=0.28)(PolicyOutput(batch.old_logps + 1.5, None), batch)
    assert out.per_token[batch.mask][0].item() == pytest.approx(math.exp(1.5), rel=1e-5)
    assert out.metrics["kl_old"].item() == pytest.approx(-1.5, rel=1e-5)


def test_clip_loss_keeps_the_contract_and_its_bounds() -> None:
    check_loss(ClipLoss())
    assert list(outside(ClipLoss(clip_low=-0.1, clip_dual=0.5), "loss")) == [
        "loss.clip_low is -0.1, expected a number from 0 to 1",
        "loss.clip_dual is 0.5, expected a number above 1",
    ]


@pytest.mark.parametrize(
    ("text", "answer", "marked"),
    [
        ("6 * 7 = 42\n#### 42", "42", True),
        ("#### 1\nno, #### 2", "2", True),
        (r"so \boxed{\frac{1}{2}} it is", r"\frac{1}{2}", True),
        ("first 3, then 1,250.", "1,250", False),
        ("it costs $18", "$18", False),
        ("no idea", "no idea", False),
        ("", None, False),
    ],
)
def test_final_answer(text: str, answer: str | None, marked: bool) -> None:
    assert final_answer(text) == (answer, marked)


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        ("42", "42.0", True),
        ("1,250", "1250", True),
        ("$18", "18", True),
        ("18.", "18", True),
        ("50%", "0.5", True),
        ("1/2", r"\frac{1}{2}", True),
        ("0.5", r"\frac{1}{2}", True),
        (r"2\sqrt{2}", r"\sqrt{8}", True),
        ("41", "42", False),
        ("1/0", "0", False),
        ("apples", "42", False),
        ("-3", "3", False),
    ],
)
def test_equal(given: str, expected: str, same: bool) -> None:
    assert equal(given, expected) is same


def test_math_reward_scores_answer_and_format() -> None:
    reward = MathReward(format_weight=0.1)
    scores = check_reward(reward, ["2 + 2 = 4\n#### 4", "it is 4", "#### 5", "x"])
    assert [s.reward for s in scores] == [1.1, 1.0, 0.1, 0.0]
    assert [s.components["accuracy"] for s in scores] == [1, 1, 0, 0]
    assert reward.grade(example_trajectory("#### 4", "She has 2 + 2 = 4.\n#### 4")).reward == 1.1
    assert "no answer" in (reward.grade(example_trajectory("4", None)).error or "")


def test_exact_reward() -> None:
    assert [s.reward for s in check_reward(ExactReward(), [" 4 ", "four", "4."])] == [1, 0, 0]
    assert ExactReward().grade(example_trajectory("Yes", "yes")).reward == 0
    assert ExactReward(ignore_case=True).grade(example_trajectory("Yes", "yes")).reward == 1

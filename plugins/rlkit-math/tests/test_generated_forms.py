"""Generated answers of all kinds: few right ones are refused, and few wrong ones are paid."""

from __future__ import annotations

from random import Random

import pytest
from generated_forms import Pair, completion, pairs

from rlkit.rewards import MathReward
from rlkit.testing import example_trajectory


def misread(seed: int, count: int) -> list[Pair]:
    """Return the pairs, half of them equal, that the reward takes for the other."""
    random = Random(seed)
    wrong = []
    for pair in pairs(seed, count):
        score = MathReward().grade(example_trajectory(completion(pair.answer, random), pair.reference))
        if (score.reward == 1.0) != pair.equal:
            wrong.append(pair)
    return wrong


@pytest.mark.parametrize(("seed", "count"), [(0, 600), pytest.param(1, 12_000, marks=pytest.mark.stress)])
def test_generated_answers_are_read_right(seed: int, count: int) -> None:
    wrong = misread(seed, count)
    refused = [pair for pair in wrong if pair.equal]
    paid = [pair for pair in wrong if not pair.equal]
    assert len(refused) <= 0.01 * count, refused  # 2% of the right answers
    assert len(paid) <= 0.005 * count, paid  # 1% of the wrong answers

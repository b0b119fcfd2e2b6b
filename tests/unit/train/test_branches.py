"""Rollouts of several samples: the reward counts once, and all samples learn from it."""

from __future__ import annotations

import pytest
import torch

from rlkit.advantages import GRPO, RLOO
from rlkit.interfaces.advantage import AdvantageEstimator
from rlkit.rollout.collate import collate
from rlkit.train.credit import estimate_by_rollout
from rlkit.train.rollouts import Rollouts, select_scored, with_branches
from rlkit.types import Batch, Prompt, Score, StopReason, Trajectory, Turn

PROMPT = Prompt("p", [{"role": "user", "content": "?"}])


def sample(group: int, length: int, reward: float | None = None, *branches: Trajectory) -> Trajectory:
    """Return two tokens that are read, then `length` that are sampled."""
    return Trajectory(
        PROMPT,
        group,
        [1, 2, *range(3, 3 + length)],
        [False, False] + [True] * length,
        [0.0, 0.0] + [-0.5] * length,
        [-1, -1] + [0] * length,
        StopReason.STOP,
        [Turn("user", 0, 2), Turn("assistant", 2, 2 + length)],
        score=None if reward is None else Score(reward),
        turn_rewards=[0.0],
        branches=list(branches),
    )


def batch_of(*trajectories: Trajectory) -> Batch:
    rollouts = Rollouts(train_on=list(trajectories))
    sampled = collate(with_branches(rollouts.train_on))
    batch, rows = select_scored(rollouts, sampled, list(range(len(trajectories))))
    assert len(rows) == len(batch)
    return batch


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # rewards 1, 0, 0, 1 of four rollouts: mean 1/2; the sample standard deviation is sqrt(1/3)
        (GRPO(scale_by_std=False), [0.5, 0.5, 0.5, -0.5, -0.5, 0.5]),
        (GRPO(), [0.75**0.5, 0.75**0.5, 0.75**0.5, -(0.75**0.5), -(0.75**0.5), 0.75**0.5]),
        # the others' mean: 1 - 1/3 for a reward of 1, 0 - 2/3 for 0
        (RLOO(), [2 / 3, 2 / 3, 2 / 3, -2 / 3, -2 / 3, 2 / 3]),
    ],
    ids=["centred", "GRPO", "RLOO"],
)
def test_a_forking_rollout_counts_once(estimator: AdvantageEstimator, expected: list[float]) -> None:
    """By rows, the mean of 1, 1, 1, 0, 0, 1 would be 2/3: the rollout with three samples would weigh three times."""
    forked = sample(0, 1, 1.0, sample(9, 4), sample(9, 2))
    batch = batch_of(forked, sample(0, 3, 0.0), sample(0, 1, 0.0), sample(0, 2, 1.0))
    assert batch.main is not None
    assert batch.main.tolist() == [True, False, False, True, True, True]
    assert batch.group.tolist() == [0] * 6
    estimate_by_rollout(estimator, batch)
    assert batch.advantages is not None
    assert torch.allclose(batch.advantages, torch.tensor(expected)[:, None] * batch.mask, atol=1e-4)
    assert batch.rollouts().rewards.tolist() == [1.0, 0.0, 0.0, 1.0]


def test_without_branches_each_row_is_a_rollout() -> None:
    batch = batch_of(sample(0, 1, 1.0), sample(0, 3, 0.0))
    assert batch.main is None
    assert batch.rollouts() is batch


def test_a_rollout_that_is_left_out_takes_its_branches_along() -> None:
    rollouts = Rollouts(train_on=[sample(0, 1, 1.0, sample(0, 4)), sample(1, 2, 0.0, sample(1, 3)), sample(1, 5, 1.0)])
    sampled = collate(with_branches(rollouts.train_on))
    batch, trajectories = select_scored(rollouts, sampled, [1, 2])
    assert [t.response_length for t in trajectories] == [2, 3, 5]
    assert batch.mask.sum(-1).tolist() == [2, 3, 5]
    assert batch.token_rewards.sum(-1).tolist() == [0.0, 0.0, 1.0]

"""Rollouts of several samples: the reward counts once, and all samples learn from it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlkit.advantages import GRPO, RLOO
from rlkit.interfaces.advantage import AdvantageEstimator
from rlkit.rollout.collate import collate
from rlkit.train.credit import attach_roles, estimate_by_rollout
from rlkit.train.rollouts import Rollouts, select_scored, with_branches
from rlkit.types import AgentSpan, Batch, Prompt, Score, StopReason, Trajectory, Turn

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
        span=AgentSpan(branches=list(branches)),
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


def in_role(role: str, speaker: int, reward: float, *branches: Trajectory, group: int = 0) -> Trajectory:
    made = sample(group, 2, None, *branches)
    made.span.role, made.span.speaker, made.turn_rewards = role, speaker, [reward]
    return made


def test_roles_are_compared_with_their_like() -> None:
    """Two proposals of one prompt earn 1 and 0.5; solutions 1, 0, 0 and 1, 1.

    The first solver's last conversation forks, and its two samples have one advantage.
    """
    forked = [in_role("solver", 4, 0.0), in_role("solver", 4, 0.0)]
    first = in_role("proposer", 1, 1.0, in_role("solver", 2, 1.0), in_role("solver", 3, 0.0), *forked)
    second = in_role("proposer", 1, 0.5, in_role("solver", 2, 1.0), in_role("solver", 3, 1.0))
    first.score = second.score = Score(0.0)
    batch = batch_of(first, second)
    assert batch.main is not None
    assert batch.main.tolist() == [True, True, True, True, False, True, True, True]
    estimate_by_rollout(GRPO(scale_by_std=False), batch)
    expected = [0.25, 2 / 3, -1 / 3, -1 / 3, -1 / 3, -0.25, 0.0, 0.0]
    assert batch.advantages is not None
    assert torch.allclose(batch.advantages, torch.tensor(expected)[:, None] * batch.mask)
    assert batch.group.tolist() == [0] * 8
    assert batch.rewards.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.5, 1.0, 1.0]


def test_the_recipes_reward_counts_for_the_main_role_alone() -> None:
    rollout = in_role("proposer", 1, 1.0, in_role("proposer", 1, 1.0), in_role("solver", 2, 0.5))
    rollout.score = Score(0.25)
    assert batch_of(rollout).rewards.tolist() == [1.25, 1.25, 0.5]


def test_roles_have_their_source_and_ranks_agree_on_them() -> None:
    rows = [in_role("buyer", 1, 0.0), in_role("seller", 2, 0.0), sample(0, 2)]
    rows[0].prompt = replace(PROMPT, source="market")
    batch = batch_of(*(replace(row, score=Score(0.0)) for row in rows))
    ranks: Any = SimpleNamespace(gather_dp=lambda names: [names, ["a", "seller"]])
    attach_roles(rows, batch, ranks)
    assert batch.role_names == ("a", "agent", "market/buyer", "seller")
    assert batch.role is not None
    assert batch.role.tolist() == [2, 3, 1]


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

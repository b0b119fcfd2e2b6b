"""From rewards to advantages by hand: corrections, transforms in their order, and the types of the batches."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlkit.base.errors import PartError
from rlkit.interfaces.advantage import AdvantageEstimator
from rlkit.recipe import Correction, KLReward, Log, Rejection, RolloutLog, Shaping
from rlkit.rollout.collate import add_rewards, collate
from rlkit.testing import example_trajectory
from rlkit.train.credit import (
    RewardShaper,
    RewardTransforms,
    correct,
    estimate,
    mask_truncated,
)
from rlkit.train.rollouts import Rollouts
from rlkit.train.saved import attach_advantages, attach_credit, attach_first_pass
from rlkit.types import Batch, Score, StopReason, TrainBatch
from tests.unit.phases import context, recipe, scored


def drifted() -> Batch:
    """Make a batch whose trainer is log 2 above the engine in row 0, at it in row 1, and log 4 below in row 2."""
    gaps = torch.tensor([math.log(2), 0.0, -math.log(4), 0.0])[:, None]
    batch = scored()
    batch.trainer_logps = (batch.rollout_logps + gaps) * batch.mask
    return batch


def test_weights_are_the_ratio_of_trainer_and_engine() -> None:
    """Ratios 2, 1, 1/4 and 1 on 2, 1, 3 and 2 tokens: the mean is (4 + 1 + 0.75 + 2) / 8."""
    batch = drifted()
    assert correct(batch, Correction(high=3.0), None, lambda x: x) == {
        "correction/weight_mean": pytest.approx(7.75 / 8)
    }
    assert batch.correction_weights is not None
    assert batch.correction_weights[:, 1].tolist() == pytest.approx([2, 1, 0.25, 1])
    assert not batch.correction_weights[~batch.mask].any()
    assert batch.accepted is None
    assert correct(batch, Correction(low=0.5, high=1.5), None, lambda x: x)["correction/weight_mean"] == 3 / 8


def test_tokens_far_from_the_engine_are_rejected() -> None:
    """With ratios between 1/3 and 3 row 2 goes: three of eight tokens; on a second rank none of eight."""
    batch = drifted()
    found = correct(batch, None, Rejection(high=3.0), lambda x: x + torch.tensor([8.0, 8.0]))
    assert found == {"correction/rejected": pytest.approx(3 / 16)}
    assert batch.accepted is not None
    assert batch.accepted.any(-1).tolist() == [True, True, False, True]
    assert batch.correction_weights is None


def test_without_sections_nothing_is_corrected() -> None:
    batch = scored()
    assert correct(batch, None, None, lambda x: x) == {}
    assert (batch.correction_weights, batch.accepted) == (None, None)
    with pytest.raises(ValueError, match="batch.trainer_logps is not computed"):
        correct(batch, Correction(), None, lambda x: x)


def test_rewards_are_shaped_before_kl_is_taken_off() -> None:
    """Clipped to 0.5; then 0.1 (logp - ref) = 0.1 * 2 off each token."""
    batch = scored(trainer_logps=-1.0 * scored().mask, ref_logps=-3.0 * scored().mask)
    transforms = RewardTransforms(Shaping(clip=0.5), KLReward(coef=0.1))
    assert transforms.apply(batch, lambda x: x) == {"reward/kl_reward": pytest.approx(2), "reward/kl_coef": 0.1}
    assert batch.token_rewards[0].tolist() == pytest.approx([0, -0.2, 0.3, 0])
    assert batch.outcomes().tolist() == pytest.approx([0.1, -0.2, -0.6, 0.1])
    assert batch.rewards.tolist() == [1, 0, 0, 1]
    untouched = scored()
    assert RewardTransforms(None, None).apply(untouched, lambda x: x) == {}
    assert torch.equal(untouched.token_rewards, scored().token_rewards)


def test_the_coefficient_follows_the_trajectories_of_all_ranks() -> None:
    """KL 2 against a target of 1: an error of at most 0.2, times 4 rows on each of two ranks, over 80."""
    transforms = RewardTransforms(None, KLReward(coef=0.1, target=1.0, horizon=80))
    batch = scored(trainer_logps=-1.0 * scored().mask, ref_logps=-3.0 * scored().mask)
    transforms.apply(batch, lambda x: 2 * x)
    assert transforms.kl_penalty is not None
    assert transforms.kl_penalty.coef == pytest.approx(0.1 * (1 + 0.2 * 8 / 80))
    low = RewardTransforms(None, KLReward(coef=0.1, target=100.0, horizon=80))
    low.apply(batch, lambda x: x)
    assert low.kl_penalty is not None
    assert low.kl_penalty.coef == pytest.approx(0.1 * (1 - 0.2 * 4 / 80))


def test_a_row_without_tokens_has_no_divergence() -> None:
    """KL 2 in each of three rows; the fourth is no trajectory of the mean or of the coefficient."""
    mask = scored().mask.clone()
    mask[1] = False
    batch = scored(mask=mask, trainer_logps=-1.0 * mask, ref_logps=-3.0 * mask)
    transforms = RewardTransforms(None, KLReward(coef=0.1, target=1.0, horizon=80))
    assert transforms.apply(batch, lambda x: x)["reward/kl_reward"] == pytest.approx(2)
    assert transforms.kl_penalty is not None
    assert transforms.kl_penalty.coef == pytest.approx(0.1 * (1 + 0.2 * 3 / 80))


def test_the_running_deviation_is_over_all_ranks_and_batches() -> None:
    """1, 0, 0, 1 on each of two ranks: eight rewards with a variance of 8 * 0.25 / 7; then two more batches."""
    shaper = RewardShaper(Shaping(normalize=True))
    shaper.apply(scored(), lambda x: 2 * x)
    assert (shaper.count, shaper.mean, shaper.squares) == (8, 0.5, 2)
    batch = replace(scored(), rewards=torch.tensor([2.0, 2.0, 2.0, 2.0]), greedy_rewards=torch.full((4,), 3.0))
    shaper.apply(batch, lambda x: x)  # twelve: mean 1, squares 8 * 0.5^2 + 2 + 4 * 1
    assert (shaper.count, shaper.mean, shaper.squares) == (12, pytest.approx(1), pytest.approx(8))
    scale = (11 / 8) ** 0.5
    assert batch.outcomes().tolist() == pytest.approx([scale, 0, 0, scale])
    assert batch.required("greedy_rewards").tolist() == pytest.approx([3 * scale] * 4)
    empty = scored().rows(torch.arange(0))
    shaper.apply(empty, lambda x: x)
    assert shaper.count == 12


class Sets(AdvantageEstimator):
    """Sets what it is told."""

    def __init__(self, **fields: object) -> None:
        self.fields = fields

    def estimate(self, batch: Batch) -> None:
        for name, value in self.fields.items():
            setattr(batch, name, value)


def test_an_estimator_is_checked_and_not_blamed_for_what_it_read() -> None:
    zeros = torch.zeros(4, 4)
    batch = scored()
    estimate(Sets(advantages=zeros), batch)
    assert batch.advantages is zeros
    with pytest.raises(PartError, match="not finite"):
        estimate(Sets(advantages=zeros / 0), scored())
    estimate(Sets(advantages=zeros / 0), scored(values=zeros / 0))  # a critic that has diverged
    with pytest.raises(PartError, match="returns unset"):
        estimate(Sets(advantages=zeros), scored(), has_critic=True)
    estimate(Sets(advantages=zeros, returns=zeros), scored(), has_critic=True)
    with pytest.raises(PartError, match=r"raised ValueError.*batch.values is not computed.*Needs.VALUES"):
        estimate(Reads(), scored())


class Reads(AdvantageEstimator):
    """Reads values, which it does not announce."""

    def estimate(self, batch: Batch) -> None:
        batch.advantages = batch.required("values")


def test_advantages_are_kept_with_their_trajectories() -> None:
    short, long = example_trajectory("a"), example_trajectory("abc")
    for trajectory in (short, long):
        trajectory.score = Score(1.0)
    batch = add_rewards(collate([short, long]), [short, long])
    attach_advantages([short, long], batch)
    assert short.credit == {}
    batch.advantages = torch.arange(10.0).reshape(2, 5)
    attach_advantages([short, long], batch)
    assert short.credit == {"advantages": [0, 1, 2]}
    assert long.credit == {"advantages": [5, 6, 7, 8, 9]}
    batch.values = torch.ones(2, 5)
    attach_advantages([short, long], batch)
    assert short.credit["values"] == [1, 1, 1]


def test_advantages_are_kept_with_five_decimals() -> None:
    batch = TrainBatch.of(scored(advantages=torch.zeros(4, 4)))
    batch.advantages[0] = torch.tensor([-0.0, -0.353552371, float("nan"), float("-inf")])
    rows = [example_trajectory("abc") for _ in batch.tokens]
    attach_advantages(rows, batch)
    assert str(rows[0].credit["advantages"]) == "[0, -0.35355, nan, -inf]"
    attach_advantages([], batch, [])  # a rank that keeps none


def test_first_pass_results_stay_with_their_trajectories() -> None:
    batch = TrainBatch.of(scored(advantages=torch.ones(4, 4)))
    rows = [example_trajectory("a") for _ in batch.tokens]
    attach_first_pass(rows, batch)
    assert [row.credit for row in rows] == [{}] * 4
    batch.trainer_logps[1] = torch.tensor([0.0, -1e-8, -0.1234549, -3.0])
    assert batch.entropy is not None
    batch.entropy[2] = 0.2504
    attach_first_pass(rows, batch)
    assert rows[1].credit == {"trainer_logps": [0.0, 0.0, -0.12345]}  # of its 3 tokens
    assert str(rows[1].credit["trainer_logps"]) == "[0, 0, -0.12345]"  # a zero is one digit
    assert rows[2].credit == {"entropy": [0.25] * 3}
    assert rows[0].credit == rows[3].credit == {}


@pytest.mark.parametrize(
    ("number", "log", "attached"),
    [
        (4, RolloutLog(limit=2), [True, True, False, False]),
        (1, RolloutLog(limit=2), [True] * 4),  # `rlkit replay` reads all of a step that follows a checkpoint
        (4, RolloutLog(limit=None), [True] * 4),
        (4, RolloutLog(every=3), [False] * 4),
    ],
)
def test_credit_is_attached_where_the_run_folder_keeps_it(number: int, log: RolloutLog, attached: list[bool]) -> None:
    batch = TrainBatch.of(scored(advantages=torch.ones(4, 4), trainer_logps=-torch.ones(4, 4)))
    rows = [example_trajectory("a") for _ in batch.tokens]
    for trajectory, group in zip(rows, [0, 0, 1, 1], strict=True):
        trajectory.group = group
    made = context(recipe(log=Log(rollouts=log)))
    attach_credit(made.recipe, made.ranks, Rollouts(rows), rows, batch, number=number)
    for row, has_credit in zip(rows, attached, strict=True):
        expected = {"advantages": [1.0] * 3, "trainer_logps": [-1.0] * 3} if has_credit else {}
        assert row.credit == expected


def test_a_batch_for_updates_has_all_that_a_loss_reads() -> None:
    with pytest.raises(
        ValueError, match="batch.advantages is not computed in this run; an estimator's `estimate` sets"
    ):
        TrainBatch.of(scored())
    advantages = torch.ones(4, 4)
    batch = TrainBatch.of(scored(advantages=advantages))
    assert batch.trainer_logps.isnan().all()
    assert batch.old_logps is batch.trainer_logps
    assert batch.advantages is advantages
    assert torch.equal(batch.accepted, batch.mask)
    assert not batch.selected.any()
    known = scored(advantages=advantages, trainer_logps=-advantages, accepted=~scored().mask)
    batch = TrainBatch.of(known)
    assert batch.trainer_logps is batch.old_logps is known.trainer_logps
    assert batch.accepted is known.accepted
    batch = TrainBatch.of(replace(known, old_logps=known.rollout_logps))
    assert batch.old_logps is known.rollout_logps
    assert TrainBatch.of(batch.rows(torch.arange(0))).selected.shape == (0, 0)


def test_rows_are_cut_to_the_longest_of_them() -> None:
    batch = scored(
        advantages=torch.ones(4, 4),
        greedy_rewards=torch.arange(4.0),
    )
    batch.components, batch.component_names = torch.eye(4)[:, :3], ("a", "b", "c")
    part = batch.rows(torch.tensor([1, 0]))
    assert type(part) is Batch
    assert part.tokens.tolist() == [[1, 4, 0], [1, 2, 3]]
    assert part.components.tolist() == [[0, 1, 0], [1, 0, 0]]
    assert part.greedy_rewards is not None
    assert part.greedy_rewards.tolist() == [1, 0]
    assert part.advantages is not None
    assert part.advantages.shape == (2, 3)
    assert part.component_names == ("a", "b", "c")
    assert type(TrainBatch.of(batch).rows(torch.tensor([0]))) is TrainBatch
    moved = part.to(torch.device("meta"))
    assert {x.device.type for x in moved.tensors().values()} == {"meta"}
    assert len(part) == 2


def test_truncated_rows_are_left_out_of_the_loss() -> None:
    """Rows have 2, 1, 3 and 2 tokens; the second and the third are cut off, so that 4 of 8 tokens are accepted."""
    batch = scored()
    stops = (StopReason.STOP, StopReason.LENGTH, StopReason.CONTEXT, StopReason.TURNS)
    mask_truncated(batch, [SimpleNamespace(stop=stop) for stop in stops])  # type: ignore[misc]
    assert batch.accepted is not None
    assert batch.accepted.sum(-1).tolist() == [2, 0, 0, 2]
    batch.accepted[0] = False  # as a rejection does
    mask_truncated(batch, [SimpleNamespace(stop=StopReason.STOP)] * 4)  # type: ignore[list-item]
    assert batch.accepted.sum(-1).tolist() == [0, 0, 0, 2]

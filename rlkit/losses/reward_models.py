"""Losses of reward models: of answers that are compared, and of turns that are right or wrong."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from rlkit.base.ranges import NonNegativeFloat
from rlkit.interfaces.loss import Inputs, ScoreLoss, SequenceOutput
from rlkit.ops.groups import group_stats, mean_over_pairs, pairs
from rlkit.ops.masked import ends_of, last_of, masked_sum
from rlkit.types import TrainBatch


class BradleyTerry(ScoreLoss):
    """-log sigmoid(s better - s worse - margin (r better - r worse)), s the score of a row and r its reward.

    Source: Bradley and Terry 1952; Ouyang et al. 2022 (arXiv:2203.02155), equation 1: the pairs of a group with unequal
    rewards are averaged, then the groups. `margin` is that of Llama 2 (arXiv:2307.09288, equation 2), where rewards say
    how much better an answer is. `centre` adds centre (s better + s worse)^2 (Eisenstein et al. 2023,
    arXiv:2312.09244), which keeps the mean of the scores near 0: the comparisons leave it open. A group's loss is on
    all of its rows; groups of equal rewards count nowhere.

    Args:
        margin: How much larger the difference of scores should be for each unit of reward between two answers.
        centre: Weight of the squared sum of both scores; usual: 0.01.
    """

    inputs: ClassVar[Inputs] = ScoreLoss.inputs | Inputs.GROUPS
    formula: ClassVar[str] = (
        "-log sigmoid(s_better - s_worse - {margin} (r_better - r_worse)) + {centre} (s_better + s_worse)^2"
    )

    def __init__(self, margin: NonNegativeFloat = 0.0, centre: NonNegativeFloat = 0.0) -> None:
        self.margin = margin
        self.centre = centre

    def usable_rows(self, batch: TrainBatch) -> Tensor:
        return ~group_stats(batch.rewards, batch.group).equal

    def from_scores(self, scores: Tensor, batch: TrainBatch) -> SequenceOutput:
        row_scores = last_of(scores, batch.mask)
        pair_rows = pairs(batch.rewards, batch.group)
        better, worse = row_scores[pair_rows.better], row_scores[pair_rows.worse]
        gap = batch.rewards[pair_rows.better] - batch.rewards[pair_rows.worse]
        by_pair = -nn.functional.logsigmoid(better - worse - self.margin * gap) + self.centre * (better + worse) ** 2
        loss = mean_over_pairs(by_pair, pair_rows, batch.group)
        usable = self.usable_rows(batch)
        if not bool(usable.any()):
            return SequenceOutput(loss, {})
        margin = (better - worse).detach()
        measured = {"margin": margin, "preference_accuracy": (margin > 0).float()}
        metrics = {name: mean_over_pairs(x, pair_rows, batch.group)[usable].mean() for name, x in measured.items()}
        return SequenceOutput(loss, metrics | {"score": row_scores.detach()[usable].mean()})


class BinaryCrossEntropy(ScoreLoss):
    """-y log sigmoid(s) - (1 - y) log(1 - sigmoid(s)), s the score at the end of a turn and y its reward, 0 to 1.

    It trains a process reward model: whether a turn is right, given all before it. The turns of a row are averaged,
    then the rows. Source: Lightman et al. 2023 (arXiv:2305.20050), section 2.6, by turns of the policy in place of
    lines.

    Metrics: `margin` is s, with its sign changed for turns of y below 0.5; `preference_accuracy` is the share of turns
    with a positive one, and `score` the mean of s. Each is a mean over the turns of a row, then over rows.
    """

    inputs: ClassVar[Inputs] = ScoreLoss.inputs | Inputs.TURN_REWARDS
    formula: ClassVar[str] = "-y_k log sigmoid(s_k) - (1 - y_k) log(1 - sigmoid(s_k)), a row's mean over its turns k"

    def from_scores(self, scores: Tensor, batch: TrainBatch) -> SequenceOutput:
        labels, turn_ends = batch.token_rewards, ends_of(batch.mask)
        turns = turn_ends.sum(-1).clamp(min=1)
        loss = masked_sum(nn.functional.softplus(scores) - labels * scores, turn_ends, -1) / turns
        scores = scores.detach()
        margin = scores.where(labels >= 0.5, -scores)
        by_turn = {"margin": margin, "preference_accuracy": (margin > 0).float(), "score": scores}
        metrics = {name: (masked_sum(x, turn_ends, -1) / turns).mean() for name, x in by_turn.items()}
        return SequenceOutput(loss, metrics)

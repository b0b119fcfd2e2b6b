"""Odds-ratio preference optimization's loss."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from rlkit.base.ranges import NonNegativeFloat
from rlkit.interfaces.loss import PairLoss
from rlkit.ops.masked import masked_sum
from rlkit.types import PolicyOutput, TrainBatch


class ORPO(PairLoss):
    """-log p of the better row - coef log sigmoid(log odds of the better row - log odds of the worse).

    p is the geometric mean of the probabilities of a row's tokens, its odds p / (1 - p), so that the first term is the
    cross-entropy by token. It trains from a base model, without a reference. Source: Hong et al. 2024
    (arXiv:2403.07691), equations 6 and 7. Their code and TRL's count the prompt's tokens in the cross-entropy too.

    Args:
        coef: The weight of the odds ratio (lambda in the paper).
    """

    formula: ClassVar[str] = (
        "-log p_better - {coef} log sigmoid(log odds p_better - log odds p_worse), p = exp(mean_t(logp))"
    )

    def __init__(self, coef: NonNegativeFloat = 0.1) -> None:
        self.coef = coef

    def scores(self, out: PolicyOutput, batch: TrainBatch) -> Tensor:
        mean = masked_sum(out.logps, batch.mask, -1) / batch.mask.sum(-1).clamp(min=1)
        mean = mean.clamp(max=-1e-6)  # the odds of a certain row are infinite
        return mean - (-mean.expm1()).log()

    def per_pair(self, better: Tensor, worse: Tensor) -> Tensor:
        cross_entropy = -nn.functional.logsigmoid(better)  # the inverse of the log odds: log p
        return cross_entropy - self.coef * nn.functional.logsigmoid(better - worse)

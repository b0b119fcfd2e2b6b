"""Simple preference optimization's loss."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from rlkit.base.ranges import NonNegativeFloat, PositiveFloat
from rlkit.interfaces.loss import PairLoss
from rlkit.ops.masked import masked_sum
from rlkit.types import PolicyOutput, TrainBatch


class SimPO(PairLoss):
    """-log sigmoid(beta (d of the better row - d of the worse) - gamma), d the mean log-prob of a row's tokens.

    Without a reference. Source: Meng et al. 2024 (arXiv:2405.14734), equation 6.

    Args:
        beta: The scale of the mean log-probs; usual: 2 to 10.
        gamma: The margin by which the better row shall lead; usual: 0.3 to 0.8 of beta.
    """

    formula: ClassVar[str] = "-log sigmoid({beta} (d_better - d_worse) - {gamma}), d = mean_t(logp)"

    def __init__(self, beta: PositiveFloat = 2.0, gamma: NonNegativeFloat = 1.0) -> None:
        self.beta = beta
        self.gamma = gamma

    def scores(self, out: PolicyOutput, batch: TrainBatch) -> Tensor:
        return self.beta * masked_sum(out.logps, batch.mask, -1) / batch.mask.sum(-1).clamp(min=1)

    def per_pair(self, better: Tensor, worse: Tensor) -> Tensor:
        return -nn.functional.logsigmoid(better - worse - self.gamma)

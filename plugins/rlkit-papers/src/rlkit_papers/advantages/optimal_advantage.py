"""The optimal advantage of A*-PO, from samples of the reference."""

from __future__ import annotations

from typing import ClassVar

from rlkit.base.ranges import PositiveFloat
from rlkit.interfaces.advantage import AdvantageEstimator, Needs
from rlkit.types import Batch


class OptimalAdvantage(AdvantageEstimator):
    """A = R - V*, where V* = beta log mean exp(R_ref / beta) is the optimal value of the prompt under a KL penalty.

    R_ref are the rewards of the reference's samples of the prompt, in the rows' column `reference_rewards`, which
    `rlkit data prepare --samples` writes. Source: Brantley et al. 2025 (arXiv:2505.20686), stage 1 of A*-PO. Its stage
    2 is the loss `AdvantageRegression`, with one sample of a prompt.

    Args:
        beta: beta_1 of the paper: V* is near the mean of R_ref if it is large, and near the maximum if it is small.
    """

    needs: ClassVar[Needs] = Needs.REFERENCE_REWARDS
    formula: ClassVar[str] = "A = R - {beta} log mean exp(R_ref / {beta})"

    def __init__(self, beta: PositiveFloat = 0.5) -> None:
        self.beta = beta

    def estimate(self, batch: Batch) -> None:
        rewards = batch.required("reference_rewards").double()
        present = ~rewards.isnan()
        exponents = (rewards / self.beta).masked_fill(~present, -float("inf"))
        value = self.beta * (exponents.logsumexp(-1) - present.sum(-1).log())
        batch.advantages = (batch.outcomes() - value).float()[:, None] * batch.mask

"""REINFORCE++'s advantage."""

from __future__ import annotations

from typing import ClassVar

from rlkit.base.ranges import Share
from rlkit.interfaces.advantage import AdvantageEstimator
from rlkit.ops.masked import whiten
from rlkit.ops.returns import discounted
from rlkit.types import Batch


class ReinforcePP(AdvantageEstimator):
    """A = the discounted return from each token on, whitened over the batch.

    Source: Hu 2025 (arXiv:2501.03262).

    Args:
        gamma: Discount from one chosen token to the next.
    """

    formula: ClassVar[str] = "A_t = whiten(sum_(s>=t) {gamma}^(s-t) r_s)"

    def __init__(self, gamma: Share = 1.0) -> None:
        self.gamma = gamma

    def estimate(self, batch: Batch) -> None:
        batch.returns = discounted(batch.token_rewards, batch.mask, self.gamma)
        batch.advantages = whiten(batch.returns, batch.mask, self.reduce)

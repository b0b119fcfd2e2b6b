"""Generalised advantage estimation, which PPO uses."""

from __future__ import annotations

from typing import ClassVar

from rlkit.base.ranges import Share
from rlkit.interfaces.advantage import AdvantageEstimator, Needs
from rlkit.ops.masked import whiten
from rlkit.ops.returns import gae
from rlkit.types import Batch


class GAE(AdvantageEstimator):
    """A_t = sum of (gamma lam)^l delta_(t+l) with delta_t = r_t + gamma V_(t+1) - V_t, whitened over the batch.

    Source: Schulman et al. 2015 (arXiv:1506.02438), equation 16. Tokens that the policy did not choose are
    skipped. `returns` are A + V before whitening.

    Args:
        gamma: Discount from one chosen token to the next.
        lam: Weight of longer estimates; 1 is the Monte Carlo return minus the value.
    """

    needs: ClassVar[Needs] = Needs.VALUES
    formula: ClassVar[str] = "A = whiten(sum_l ({gamma} * {lam})^l delta_(t+l)), delta_t = r_t + {gamma} V_(t+1) - V_t"

    def __init__(self, gamma: Share = 1.0, lam: Share = 1.0) -> None:
        self.gamma = gamma
        self.lam = lam

    def estimate(self, batch: Batch) -> None:
        values = batch.required("values")
        raw = gae(batch.token_rewards, values, batch.mask, self.gamma, self.lam)
        batch.returns = (raw + values) * batch.mask
        batch.advantages = whiten(raw, batch.mask, self.reduce)

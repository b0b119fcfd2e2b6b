"""ReMax's advantage."""

from __future__ import annotations

from typing import ClassVar

from rlkit.base.ranges import Share
from rlkit.interfaces.advantage import AdvantageEstimator, Needs
from rlkit.ops.returns import discounted
from rlkit.types import Batch


class ReMax(AdvantageEstimator):
    """A_t = sum of the rewards from t on, minus the reward of a greedy completion of the same prompt.

    Source: Li et al. 2023 (arXiv:2310.10505). The greedy completions are sampled because of `needs`.

    Args:
        gamma: Discount from one chosen token to the next.
    """

    needs: ClassVar[Needs] = Needs.GREEDY
    formula: ClassVar[str] = "A_t = sum_(s>=t) {gamma}^(s-t) r_s - R_greedy"

    def __init__(self, gamma: Share = 1.0) -> None:
        self.gamma = gamma

    def estimate(self, batch: Batch) -> None:
        returns = discounted(batch.token_rewards, batch.mask, self.gamma)
        batch.returns = returns
        batch.advantages = (returns - batch.required("greedy_rewards")[:, None]) * batch.mask

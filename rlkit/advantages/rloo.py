"""REINFORCE leave-one-out's advantage."""

from __future__ import annotations

from typing import ClassVar

from rlkit.interfaces.advantage import AdvantageEstimator, Needs
from rlkit.ops.groups import group_stats
from rlkit.types import Batch


class RLOO(AdvantageEstimator):
    """A = R - mean of the group's other rewards = n / (n - 1) (R - mean), the same for every token.

    0 for groups of equal rewards and groups of one. Source: Ahmadian et al. 2024 (arXiv:2402.14740).
    """

    needs: ClassVar[Needs] = Needs.GROUPS
    formula: ClassVar[str] = "A = n / (n - 1) (R - mean_group)"

    def estimate(self, batch: Batch) -> None:
        outcomes = batch.outcomes()
        stats = group_stats(outcomes, batch.group)
        advantage = (outcomes - stats.mean) * stats.size / (stats.size - 1).clamp(min=1)
        batch.advantages = advantage.masked_fill(stats.equal, 0.0)[:, None] * batch.mask

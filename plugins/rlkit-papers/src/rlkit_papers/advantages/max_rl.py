"""Maximum-likelihood reinforcement learning's advantage."""

from __future__ import annotations

from typing import ClassVar

from rlkit.interfaces.advantage import AdvantageEstimator, Needs
from rlkit.ops.groups import group_stats
from rlkit.types import Batch


class MaxRL(AdvantageEstimator):
    """A = (R - mean of the group) / mean of the group, and 0 if that mean is not positive.

    0 for groups of equal rewards and groups of one. Source: Tajwar et al. 2026 (arXiv:2602.02710).
    """

    needs: ClassVar[Needs] = Needs.GROUPS
    formula: ClassVar[str] = "A = (R - mean_group) / mean_group, 0 where mean_group <= 0"

    def estimate(self, batch: Batch) -> None:
        outcomes = batch.outcomes()
        stats = group_stats(outcomes, batch.group)
        useful = (stats.mean > 0) & ~stats.equal
        advantage = (outcomes - stats.mean) / stats.mean.masked_fill(~useful, 1.0)
        batch.advantages = advantage.masked_fill(~useful, 0.0)[:, None] * batch.mask

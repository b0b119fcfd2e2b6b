"""On-policy RL with an optimal baseline."""

from __future__ import annotations

from typing import ClassVar

import torch

from rlkit.interfaces.advantage import AdvantageEstimator, Needs
from rlkit.ops.groups import group_stats, group_sum
from rlkit.types import Batch


class OPO(AdvantageEstimator):
    """A = R - b, where b = sum of L R / sum of L is the group's mean reward weighted by length.

    0 for groups of equal rewards and groups of one. Source: Hao et al. 2025 (arXiv:2505.23585).
    """

    needs: ClassVar[Needs] = Needs.GROUPS
    formula: ClassVar[str] = "A = R - sum_group(L R) / sum_group(L)"

    def estimate(self, batch: Batch) -> None:
        outcomes = batch.outcomes()
        lengths = batch.mask.sum(-1).float()
        weighted, total = group_sum(torch.stack((lengths * outcomes, lengths), -1), batch.group).unbind(-1)
        equal = group_stats(outcomes, batch.group).equal
        advantage = (outcomes - weighted / total.clamp(min=1)).masked_fill(equal, 0.0)
        batch.advantages = advantage[:, None] * batch.mask

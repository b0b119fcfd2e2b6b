"""Group policy gradient's advantage."""

from __future__ import annotations

from typing import ClassVar

import torch

from rlkit.interfaces.advantage import AdvantageEstimator, Needs
from rlkit.ops.groups import centred
from rlkit.types import Batch


class GPG(AdvantageEstimator):
    """A = alpha (R - mean of the group) with alpha = rows of the batch / rows whose reward is not 0, over all ranks.

    0 for groups of equal rewards and groups of one. Source: Chu et al. 2025 (arXiv:2504.02546).
    """

    needs: ClassVar[Needs] = Needs.GROUPS
    formula: ClassVar[str] = "A = (rows / rows with R != 0) (R - mean_group)"

    def estimate(self, batch: Batch) -> None:
        outcomes = batch.outcomes()
        rows, rewarded = self.reduce(torch.tensor([len(outcomes), float((outcomes != 0).sum())]))
        alpha = float(rows / rewarded.clamp(min=1))
        batch.advantages = alpha * centred(outcomes, batch.group)[:, None] * batch.mask

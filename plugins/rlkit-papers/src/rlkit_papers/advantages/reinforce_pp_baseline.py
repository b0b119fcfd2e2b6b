"""REINFORCE++ with a baseline."""

from __future__ import annotations

from typing import ClassVar

from rlkit.interfaces.advantage import AdvantageEstimator, Needs
from rlkit.ops.groups import centred
from rlkit.ops.masked import whiten
from rlkit.types import Batch


class ReinforcePPBaseline(AdvantageEstimator):
    """A = R - mean of the group, whitened over the batch; 0 for a group of one before whitening.

    Source: Hu 2025 (arXiv:2501.03262), the variant with a group baseline.
    """

    needs: ClassVar[Needs] = Needs.GROUPS
    formula: ClassVar[str] = "A = whiten(R - mean_group)"

    def estimate(self, batch: Batch) -> None:
        advantages = centred(batch.outcomes(), batch.group)[:, None] * batch.mask
        batch.advantages = whiten(advantages, batch.mask, self.reduce)

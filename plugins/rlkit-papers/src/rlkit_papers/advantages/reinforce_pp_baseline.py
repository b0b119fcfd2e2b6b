"""REINFORCE++ with a baseline."""

from __future__ import annotations

from typing import ClassVar

from rlkit.interfaces.advantage import AdvantageEstimator, Needs
from rlkit.ops.groups import normalized
from rlkit.ops.masked import whiten
from rlkit.types import Batch


class ReinforcePPBaseline(AdvantageEstimator):
    """A = R - mean of the group, whitened over the batch; 0 for a group of one before whitening.

    Source: Hu 2025 (arXiv:2501.03262), the variant with a group baseline.
    """

    needs: ClassVar[Needs] = Needs.GROUPS
    formula: ClassVar[str] = "A = whiten(R - mean_group)"

    def estimate(self, batch: Batch) -> None:
        centred = normalized(batch.outcomes(), batch.group, None)[:, None] * batch.mask
        batch.advantages = whiten(centred, batch.mask, self.reduce)

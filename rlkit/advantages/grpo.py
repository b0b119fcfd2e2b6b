"""Group relative policy optimization's advantage."""

from __future__ import annotations

from typing import ClassVar, Literal

from rlkit.base.ranges import PositiveFloat
from rlkit.interfaces.advantage import AdvantageEstimator, Needs
from rlkit.ops.groups import normalized
from rlkit.ops.masked import sample_std
from rlkit.types import Batch


class GRPO(AdvantageEstimator):
    """A = (R - mean of the group) / (std + eps), the same for every token of a trajectory.

    Exactly 0 for groups of equal rewards and groups of one.

    Source: Shao et al. 2024 (arXiv:2402.03300), section 4.1.2. Without the division by the standard deviation it is
    Dr. GRPO (Liu et al. 2025, arXiv:2503.20783); with the standard deviation over the batch it is ScaleRL (Khatri et
    al. 2025, arXiv:2510.13786).

    Args:
        scale_by_std: Whether to divide by the sample standard deviation of the group's rewards; batch for that of
            R - mean of the group over all trajectories of a step.
        eps: Number added to the standard deviation.
    """

    needs: ClassVar[Needs] = Needs.GROUPS

    def __init__(self, scale_by_std: bool | Literal["batch"] = True, eps: PositiveFloat = 1e-6) -> None:
        self.scale_by_std = scale_by_std
        self.eps = eps

    def explain(self) -> str:
        if self.scale_by_std == "batch":
            return f"A = (R - mean_group) / (std_batch(R - mean_group) + {self.eps})"
        return f"A = (R - mean_group) / (std_group + {self.eps})" if self.scale_by_std else "A = R - mean_group"

    def estimate(self, batch: Batch) -> None:
        advantage = normalized(batch.outcomes(), batch.group, self.eps if self.scale_by_std is True else None)
        if self.scale_by_std == "batch":
            advantage = advantage / (sample_std(advantage, self.reduce) + self.eps)
        batch.advantages = advantage[:, None] * batch.mask

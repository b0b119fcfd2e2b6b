"""An advantage for several rewards."""

from __future__ import annotations

from typing import ClassVar

import torch

from rlkit.base.errors import RecipeError
from rlkit.base.ranges import FiniteFloat
from rlkit.interfaces.advantage import AdvantageEstimator, Needs
from rlkit.ops.groups import normalized
from rlkit.ops.masked import whiten
from rlkit.types import Batch


class GDPO(AdvantageEstimator):
    """A = whiten(sum over components of w_k A_k), where A_k is GRPO's advantage for component k of the reward.

    Source: Liu et al. 2026 (arXiv:2601.05242). The components are those that the reward reports, such as `Composite`'s.

    Args:
        weights: Weights by the names of the components.
    """

    needs: ClassVar[Needs] = Needs.GROUPS | Needs.COMPONENTS
    formula: ClassVar[str] = "A = whiten(sum_k w_k (R_k - mean_group) / (std_group + 1e-6)), w = {weights}"

    def __init__(self, weights: dict[str, FiniteFloat]) -> None:
        if not weights:
            raise RecipeError("GDPO has no weights, expected a weight for each component of the reward to use")
        self.weights = weights

    def estimate(self, batch: Batch) -> None:
        missing = [name for name in self.weights if name not in batch.component_names]
        if missing and len(batch):
            raise RecipeError(
                f"GDPO weighs the component {missing[0]!r}, which the reward does not report; it reports: "
                f"{', '.join(batch.component_names) or 'none'}"
            )
        total = torch.zeros_like(batch.rewards)
        for name, weight in self.weights.items() if len(batch) else ():
            component = batch.components[:, batch.component_names.index(name)]
            has = component.isfinite()
            total[has] += weight * normalized(component[has], batch.group[has], 1e-6)
        batch.advantages = whiten(total[:, None] * batch.mask, batch.mask, self.reduce)

"""An advantage for several rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from typing import ClassVar

import torch
from torch import Tensor

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
        self._reported: set[str] = set()

    def estimate(self, batch: Batch) -> None:
        table = self._components(batch)
        self._require(table, batch.component_names)
        total = torch.zeros_like(batch.rewards)
        for weight, component in zip(self.weights.values(), table.unbind(1), strict=True):
            has = component.isfinite()
            total[has] += weight * normalized(component[has], batch.group[has], 1e-6)
        batch.advantages = whiten(total[:, None] * batch.mask, batch.mask, self.reduce)

    def _components(self, batch: Batch) -> Tensor:
        """Return the weighed components [B,K]; NaN where a sample, or all of this rank, has none."""
        table = batch.rewards.new_full((len(batch), len(self.weights)), nan)
        for column, name in enumerate(self.weights):
            if name in batch.component_names:
                table[:, column] = batch.components[:, batch.component_names.index(name)]
        return table

    def _require(self, table: Tensor, reported: Sequence[str]) -> None:
        """Check that each weighed component was reported by a sample of any rank, in this step or an earlier one."""
        *counts, rows = self.reduce(torch.cat([table.isfinite().sum(0), table.new_tensor([len(table)])])).tolist()
        self._reported |= {name for name, count in zip(self.weights, counts, strict=True) if count}
        missing = [name for name in self.weights if name not in self._reported]
        if missing and rows:
            raise RecipeError(
                f"GDPO weighs the component {missing[0]!r}, which the reward does not report; it reports: "
                f"{', '.join(reported) or 'none'}"
            )

    def state_dict(self) -> dict[str, float]:
        return dict.fromkeys(sorted(self._reported), 1.0)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._reported = set(state)

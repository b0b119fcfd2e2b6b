"""A baseline for each token that minimises the gradient's variance."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rlkit.interfaces.advantage import AdvantageEstimator, Needs
from rlkit.ops.returns import discounted
from rlkit.types import Batch


class OptimalTokenBaseline(AdvantageEstimator):
    """A_t = G_t - b_t, with b_t the group's mean return at its t-th chosen token, weighted by gradient energy.

    w_t = 1 - 2 pi_t + sum of pi^2 (times the squared importance weight, if there is one), W_t = w_1 + ... + w_t,
    b_t = sum of G_t W_t / (sum of W_t + 1e-8) over the group. b_t is 0 if only one trajectory has a t-th chosen token.
    The advantage of a group of one is 0, as with the other estimators.

    Source: verl's `optimal_token_baseline` and `tir_optimal_token_baseline` (which counts chosen tokens, as here).
    """

    needs: ClassVar[Needs] = Needs.GROUPS | Needs.OLD_LOGPS | Needs.SUM_PI_SQUARED
    formula: ClassVar[str] = "A_t = G_t - sum_group(G_t W_t) / (sum_group(W_t) + 1e-8), W = cumsum(1 - 2 pi + sum pi^2)"

    def estimate(self, batch: Batch) -> None:
        mask = batch.mask
        energy = 1 - 2 * batch.required("old_logps").exp() + batch.required("sum_pi_squared")
        if batch.correction_weights is not None:
            energy = energy * batch.correction_weights**2
        returns = discounted(batch.token_rewards, mask)
        ordinal = (mask.cumsum(-1) - 1).clamp(min=0)  # [B,T] i64, t for the t-th chosen token
        cumulative = (energy * mask).cumsum(-1)
        baseline = torch.zeros_like(returns)
        for group in batch.group.unique():  # type: ignore[no-untyped-call]
            [rows] = torch.where(batch.group == group)
            if len(rows) > 1:
                baseline[rows] = _baseline(returns[rows], cumulative[rows], ordinal[rows], mask[rows])
            else:
                baseline[rows] = returns[rows]
        batch.advantages = (returns - baseline) * mask


def _baseline(returns: Tensor, cumulative: Tensor, ordinal: Tensor, mask: Tensor) -> Tensor:
    """Return the baseline [N,T] of one group, with rows aligned by their chosen tokens."""
    zeros = returns.new_zeros(returns.shape[1])
    index = ordinal[mask]
    weighted = zeros.scatter_add(0, index, (returns * cumulative)[mask])
    total = zeros.scatter_add(0, index, cumulative[mask])
    rows = zeros.scatter_add(0, index, torch.ones_like(index, dtype=zeros.dtype))
    by_ordinal = torch.where(rows > 1, weighted / (total + 1e-8), 0.0)
    return by_ordinal[ordinal] * mask

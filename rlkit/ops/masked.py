"""Masked sums and means, over one tensor or over all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Reducer = Callable[[Tensor], Tensor]


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum x where the mask is True; what stands elsewhere, NaN included, does not count."""
    kept = torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, reduce: Reducer = lambda x: x) -> Tensor:
    """Give the mean of x where the mask is True, over all ranks if `reduce` sums over them; 0 if there is none."""
    total = reduce(torch.stack((masked_sum(x.float(), mask), mask.sum().float())))
    return total[0] / total[1].clamp(min=1)

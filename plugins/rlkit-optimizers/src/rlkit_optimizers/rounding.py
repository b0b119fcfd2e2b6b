"""Stochastic rounding."""

from __future__ import annotations

import torch
from torch import Tensor


def stochastically_rounded(numbers: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 to bfloat16, to a neighbour with the probability that makes the mean exact.

    Numbers that are not finite, or beyond bfloat16's range, are rounded to the nearest.
    """
    noise = torch.randint(0, 2**16, numbers.shape, dtype=torch.int32, device=numbers.device, generator=generator)
    rounded = ((numbers.view(torch.int32) + noise) & ~0xFFFF).view(torch.float32)
    return torch.where(rounded.isfinite() & numbers.isfinite(), rounded, numbers).to(torch.bfloat16)

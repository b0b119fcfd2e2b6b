"""Masked sums and means, over one tensor or over all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Reducer = Callable[[Tensor], Tensor]


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum x where the mask is True; masked entries are ignored, even NaN."""
    selected = torch.where(mask, x, 0)
    return selected.sum() if dim is None else selected.sum(dim)


def at_last(x: Tensor, mask: Tensor) -> Tensor:
    """Return x [B] at the last True column of each row of a mask [B,T] bool, and 0 elsewhere; [B,T]."""
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    return x[:, None] * last


def ends_of(mask: Tensor) -> Tensor:
    """Mark the last column of each run of True in a mask [B,T] bool, where a turn of the policy ends; [B,T] bool."""
    following = torch.cat((mask[:, 1:], torch.zeros_like(mask[:, :1])), -1)
    return mask & ~following


def last_of(x: Tensor, mask: Tensor) -> Tensor:
    """Return x [B,T] at the last True column of each row of a mask [B,T] bool; 0 for rows without one."""
    return at_last(x.new_ones(len(x)), mask).mul(x).sum(-1)


def span_sums(x: Tensor, starts: Tensor) -> Tensor:
    """Return at each column of x [B,T] the sum over its span; starts [B,T] i64 are the spans' first columns."""
    return torch.zeros_like(x).scatter_add(1, starts, x).gather(1, starts)


def masked_mean(x: Tensor, mask: Tensor, reduce: Reducer = lambda x: x) -> Tensor:
    """Return the mean of x where the mask is True, over all ranks if `reduce` sums over them; 0 for an empty mask."""
    return masked_means((x,), mask, reduce)[0]


def masked_means(tensors: Sequence[Tensor], mask: Tensor, reduce: Reducer = lambda x: x) -> Tensor:
    """Return the means [N] of N tensors where the mask is True, with one call of `reduce`: see `masked_mean`."""
    totals = reduce(torch.stack((*(masked_sum(x.float(), mask) for x in tensors), mask.sum().float())))
    means: Tensor = totals[:-1] / totals[-1].clamp(min=1)
    return means


def sample_std(x: Tensor, reduce: Reducer = lambda x: x) -> Tensor:
    """Return the sample standard deviation of x [N] f32, over all ranks; 0 for fewer than two values."""
    total, count = reduce(torch.stack((x.double().sum(), x.new_tensor(len(x), dtype=torch.float64))))
    spread = reduce(((x.double() - total / count.clamp(min=1)) ** 2).sum()[None])[0]
    deviation: Tensor = (spread / (count - 1).clamp(min=1)).sqrt().float()
    return deviation


def whiten(x: Tensor, mask: Tensor, reduce: Reducer = lambda x: x) -> Tensor:
    """Return (x - mean) / sqrt(var + 1e-8) with the sample variance under the mask, over all ranks; 0 outside it.

    With fewer than two values x is returned unchanged, with a warning.
    """
    total, count = reduce(torch.stack((masked_sum(x.double(), mask), mask.sum().double())))
    if count < 2:
        warnings.warn(f"whitening needs at least 2 values, got {int(count)}; they stay unchanged", stacklevel=2)
        return torch.where(mask, x, 0.0)
    mean = total / count
    spread = reduce(masked_sum((x.double() - mean) ** 2, mask)[None])[0]
    variance = spread / (count - 1)
    return torch.where(mask, (x - mean) * (variance + 1e-8).rsqrt(), 0.0).float()

"""Statistics of the samples of one prompt."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class GroupStats(NamedTuple):
    """For each row, statistics of its group; all [B]."""

    size: Tensor
    mean: Tensor
    std: Tensor  # sample standard deviation (n - 1); 0 for a group of one
    equal: Tensor  # True where all values of the group are the same, or there is only one


def group_stats(values: Tensor, group: Tensor) -> GroupStats:
    """Return statistics of values [B] f32 within equal `group` ids [B] i64."""
    _, index = torch.unique(group, return_inverse=True)
    count = int(index.max()) + 1 if len(index) else 0
    zeros = torch.zeros(count, dtype=torch.float64, device=values.device)
    x = values.double()
    size = zeros.scatter_add(0, index, torch.ones_like(x))
    mean = zeros.scatter_add(0, index, x) / size
    squares = zeros.scatter_add(0, index, (x - mean[index]) ** 2)
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    largest = zeros.scatter_reduce(0, index, x, "amax", include_self=False)
    smallest = zeros.scatter_reduce(0, index, x, "amin", include_self=False)
    equal = largest == smallest
    return GroupStats(size[index].long(), mean[index].float(), std[index].float(), equal[index])


class Pairs(NamedTuple):
    """Pairs of rows of one group with unequal rewards; both [N] i64."""

    better: Tensor
    worse: Tensor


def pairs(rewards: Tensor, group: Tensor) -> Pairs:
    """Return all pairs of rows with equal `group` ids [B] i64 and unequal rewards [B] f32."""
    better, worse = ((group[:, None] == group) & (rewards[:, None] > rewards)).nonzero(as_tuple=True)
    return Pairs(better, worse)


def mean_over_pairs(values: Tensor, row_pairs: Pairs, group: Tensor) -> Tensor:
    """Return for each row [B] the mean of values [N] over the pairs of its group; 0 for a group without pairs."""
    zeros = values.new_zeros(len(group))
    total = group_sum(zeros.index_add(0, row_pairs.better, values), group)
    count = group_sum(zeros.index_add(0, row_pairs.better, torch.ones_like(values)), group)
    return total / count.clamp(min=1)


def group_sum(values: Tensor, group: Tensor) -> Tensor:
    """Return for each row the sum of values [B,...] over its group."""
    _, index = torch.unique(group, return_inverse=True)
    sums = torch.zeros_like(values).index_add(0, index, values)
    return sums[index]


def centred(values: Tensor, group: Tensor) -> Tensor:
    """Return values [B] minus their group's mean; exactly 0 for groups of equal values and groups of one."""
    return normalized(values, group, None)


def normalized(values: Tensor, group: Tensor, eps: float | None) -> Tensor:
    """Return values [B] minus their group's mean, divided by its sample standard deviation + eps unless that is None.

    Exactly 0 for groups of equal values and groups of one.
    """
    stats = group_stats(values, group)
    centred = values - stats.mean
    scaled = centred if eps is None else centred / (stats.std + eps)
    return scaled.masked_fill(stats.equal, 0.0)

"""Returns and advantages along a trajectory; tokens that the policy did not choose are skipped."""

from __future__ import annotations

import torch
from torch import Tensor


def discounted(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Return the discounted sum of rewards from each chosen token on, [B,T]; 0 outside the mask.

    Only chosen tokens count a discount: x_t = r_t + gamma x_next, with x_next that of the next chosen token.
    """
    result = torch.zeros_like(rewards)
    later = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        here = rewards[:, t] + gamma * later
        result[:, t] = here * mask[:, t]
        later = torch.where(mask[:, t], here, later)
    return result


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """Return generalised advantage estimates [B,T], 0 outside the mask.

    Source: Schulman et al. 2015 (arXiv:1506.02438), eq. 16.

    The value and the trace of the next chosen token are carried over the tokens between, with no further discount.
    """
    result = torch.zeros_like(rewards)
    next_value, trace = (rewards.new_zeros(len(rewards)) for _ in range(2))
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        here = delta + gamma * lam * trace
        result[:, t] = here * mask[:, t]
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        trace = torch.where(mask[:, t], here, trace)
    return result

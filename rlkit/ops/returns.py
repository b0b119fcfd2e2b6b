"""Returns and advantages along a trajectory; tokens outside the policy's mask are skipped."""

from __future__ import annotations

import torch
from torch import Tensor


def discounted(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Return the discounted sum of rewards from each chosen token on, [B,T]; 0 outside the mask.

    Only chosen tokens are discounted: x_t = r_t + gamma x_next, where x_next is the return of the next chosen token.
    """
    returns = torch.zeros_like(rewards)
    next_return = rewards.new_zeros(len(rewards))  # [B]
    for t in reversed(range(rewards.shape[1])):
        current = rewards[:, t] + gamma * next_return
        returns[:, t] = current * mask[:, t]
        next_return = torch.where(mask[:, t], current, next_return)
    return returns


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """Return generalised advantage estimates [B,T]; 0 outside the mask.

    The value and the advantage of the next chosen token are carried over the tokens between without a discount.

    Source: Schulman et al. 2015 (arXiv:1506.02438), eq. 16.
    """
    advantages = torch.zeros_like(rewards)
    next_value = rewards.new_zeros(len(rewards))  # [B]
    next_advantage = rewards.new_zeros(len(rewards))  # [B]
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        current = delta + gamma * lam * next_advantage
        advantages[:, t] = current * mask[:, t]
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        next_advantage = torch.where(mask[:, t], current, next_advantage)
    return advantages

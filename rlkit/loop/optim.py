"""The optimizer and the learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn

from rlkit.recipe import Train


def make_optimizer(module: nn.Module, train: Train) -> torch.optim.Optimizer:
    """Make AdamW over what is trainable; weight decay is for matrices only."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=train.lr)


def learning_rate(train: Train, step: int) -> float:
    """Give the learning rate of a step (the first is 1): a linear warm-up, then the schedule down to 0 at the end."""
    if step <= train.warmup_steps:
        return train.lr * step / (train.warmup_steps + 1)
    if train.schedule == "constant":
        return train.lr
    done = (step - 1 - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    if train.schedule == "linear":
        return train.lr * (1 - done)
    return train.lr * 0.5 * (1 + math.cos(math.pi * done))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate

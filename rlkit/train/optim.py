"""The optimizer and the learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn

from rlkit.distributed.fsdp2 import by_mesh
from rlkit.sections import Critic, Train


def make_optimizer(module: nn.Module, section: Train | Critic) -> torch.optim.Optimizer:
    """Make AdamW over what is trainable; weight decay is for matrices only."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    matrices, others = [p for p in trainable if p.dim() >= 2], [p for p in trainable if p.dim() < 2]
    decays = ((matrices, section.weight_decay), (others, 0.0))
    groups = [{"params": part, "weight_decay": decay} for some, decay in decays for part in by_mesh(some)]
    return torch.optim.AdamW(groups, lr=section.lr)


def learning_rate(section: Train | Critic, step: int, steps: int) -> float:
    """Return the rate of a step (the first is 1) out of `steps`: a linear warm-up, then the schedule."""
    if step <= section.warmup_steps:
        return section.lr * step / (section.warmup_steps + 1)
    if section.schedule == "constant":
        return section.lr
    done = (step - 1 - section.warmup_steps) / max(1, steps - section.warmup_steps)
    if section.schedule == "linear":
        return section.lr * (1 - done)
    return section.lr * 0.5 * (1 + math.cos(math.pi * done))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate

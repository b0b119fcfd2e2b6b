"""Optimizers and learning rates of the policy and the critic."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from rlkit.distributed.fsdp2 import by_mesh
from rlkit.interfaces import outputs
from rlkit.interfaces.optimizer import WeightGroup, WeightKind
from rlkit.models.optimizer_state import problem_of, try_out
from rlkit.models.size import by_kind
from rlkit.recipe import Critic, Train
from rlkit.registry import calling, require


def make_optimizer(module: nn.Module, section: Train | Critic) -> torch.optim.Optimizer:
    """Return the section's optimizer of the trainable parameters.

    Raises:
        PartError: The part raised, left weights out, or keeps a state that no checkpoint can hold.
        RecipeError: It has no use for the model's weights.
    """
    part, groups = section.optimizer, list(weight_groups(module, section.weight_decay))
    with calling(part, "make"):
        require(part, "make", try_out(part, section.lr))
        optimizer = part.make(groups, section.lr)
    require(part, "make", problem_of(optimizer, groups))
    return optimizer


def weight_groups(module: nn.Module, weight_decay: float) -> Iterator[WeightGroup]:
    """Yield the trainable weights by kind and by the ranks that share them; only matrices decay."""
    for kind, weights in by_kind(module).items():
        decay = 0.0 if kind is WeightKind.VECTOR else weight_decay
        yield from (WeightGroup(kind, mesh_weights, decay) for mesh_weights in by_mesh(weights))


def warmup_steps(section: Train | Critic, steps: int) -> int:
    """Return the rollout steps, out of `steps`, in which the learning rate rises."""
    if section.warmup_ratio is None:
        return section.warmup_steps
    return math.ceil(section.warmup_ratio * steps)


def learning_rate(section: Train | Critic, step: int, steps: int) -> float:
    """Return the rate of a step (the first is 1) out of `steps`: a linear warm-up, then the schedule.

    Raises:
        PartError: The schedule's factor is no number, not finite or negative.
    """
    warmup = warmup_steps(section, steps)
    if step <= warmup:
        return section.lr * step / (warmup + 1)
    schedule = section.schedule
    with calling(schedule, "factor"):
        factor = schedule.factor((step - 1 - warmup) / max(1, steps - warmup))
    require(schedule, "factor", outputs.of_schedule(factor))
    return section.lr * factor


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate

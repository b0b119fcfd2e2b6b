"""What is checked of every optimizer before a run: a step of a few numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rlkit.errors import show
from rlkit.interfaces.optimizer import Optimizer, WeightGroup, WeightKind


def try_out(part: Optimizer, lr: float = 1e-3) -> str | None:
    """Step an optimizer of a few numbers; return what is wrong with it.

    Raises:
        Exception: Its own code did.
    """
    weights = [nn.Parameter(torch.ones(*shape)) for shape in ((2, 2), (2, 2), (2,))]
    groups = [WeightGroup(kind, [weight], 0.0) for kind, weight in zip(WeightKind, weights, strict=True)]
    made = part.make(groups, lr)
    if (problem := problem_of(made, groups)) is not None:
        return problem
    materialize_state(made, weights)
    kept = {key: value for state in made.state.values() for key, value in state.items()}
    odd = [f"{key}={show(value)}" for key, value in kept.items() if not isinstance(value, Tensor)]
    return f"returned an optimizer whose state has {odd[0]}, expected tensors, as a checkpoint holds" if odd else None


def problem_of(made: object, groups: Sequence[WeightGroup]) -> str | None:
    """Return what is wrong with what a part made: it must be an optimizer of exactly these weights."""
    if not isinstance(made, torch.optim.Optimizer):
        return f"returned {show(made)}, expected a torch.optim.Optimizer"
    expected = sorted(id(weight) for group in groups for weight in group.weights)
    found = sorted(id(weight) for group in made.param_groups for weight in group["params"])
    if found != expected:
        return f"returned an optimizer of {len(found)} weights, expected the {len(expected)} of all groups, each once"
    return None


def materialize_state(optimizer: torch.optim.Optimizer, weights: Sequence[Tensor]) -> None:
    """Let an optimizer make its state of weights by a step with gradients of 0, which may change the weights."""
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad()

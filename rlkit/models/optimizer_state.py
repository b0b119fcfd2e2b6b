"""Trial steps of an optimizer before a run, to check it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rlkit.base.errors import show
from rlkit.interfaces.optimizer import Optimizer, WeightGroup, WeightKind


def try_out(part: Optimizer, lr: float = 1e-3) -> str | None:
    """Step an optimizer of a few numbers; return its problem, or None.

    Raises:
        Exception: The optimizer's own code raised it.
    """
    weights = [nn.Parameter(torch.ones(*shape)) for shape in ((2, 2), (2, 2), (2,))]
    groups = [WeightGroup(kind, [weight], 0.0) for kind, weight in zip(WeightKind, weights, strict=True)]
    optimizer = part.make(groups, lr)
    problem = problem_of(optimizer, groups)
    if problem is not None:
        return problem
    materialize_state(optimizer, weights)
    state = {key: value for weight_state in optimizer.state.values() for key, value in weight_state.items()}
    invalid = [f"{key}={show(value)}" for key, value in state.items() if not isinstance(value, Tensor)]
    if invalid:
        return f"returned an optimizer whose state has {invalid[0]}, expected tensors, as a checkpoint holds"
    return None


def problem_of(optimizer: object, groups: Sequence[WeightGroup]) -> str | None:
    """Return the reason why an object is no optimizer of exactly these weights; None if it is."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return f"returned {show(optimizer)}, expected a torch.optim.Optimizer"
    expected = sorted(id(weight) for group in groups for weight in group.weights)
    actual = sorted(id(weight) for group in optimizer.param_groups for weight in group["params"])
    if actual != expected:
        return f"returned an optimizer of {len(actual)} weights, expected the {len(expected)} of all groups, each once"
    return None


def materialize_state(optimizer: torch.optim.Optimizer, weights: Sequence[Tensor]) -> None:
    """Make an optimizer create its state by a step with zero gradients, which may change the weights."""
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad()

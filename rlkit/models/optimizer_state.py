"""Trial steps of an optimizer before a run, to check it and to measure its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

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


PROBE = 128
"""Rows and columns of the smallest weight whose state is measured."""


def state_size(part: Optimizer) -> Callable[[WeightKind, Sequence[int]], float]:
    """Return a function from a weight's kind and shape to the bytes of the optimizer's state for it.

    The state of four matrices is measured and interpolated bilinearly in rows and columns, which is exact for
    optimizers that keep numbers per element, row, column or weight.

    Raises:
        Exception: The optimizer's own code raised it.
    """
    small, wide, tall, large = (_state_sizes(part, r, c) for r in (PROBE, 2 * PROBE) for c in (PROBE, 2 * PROBE))

    def size(kind: WeightKind, shape: Sequence[int]) -> float:
        x = prod(shape[:1]) / PROBE - 1
        y = prod(shape[1:]) / PROBE - 1
        per_element = large[kind] - wide[kind] - tall[kind] + small[kind]
        return small[kind] + x * (tall[kind] - small[kind]) + y * (wide[kind] - small[kind]) + x * y * per_element

    return size


def _state_sizes(part: Optimizer, rows: int, columns: int) -> dict[WeightKind, int]:
    """Return the bytes of state of a weight of each kind."""
    matrix = (rows, columns)
    shapes = {WeightKind.MATRIX: matrix, WeightKind.EMBEDDING: matrix, WeightKind.VECTOR: matrix[:1]}
    weights = {kind: nn.Parameter(torch.zeros(shape)) for kind, shape in shapes.items()}
    optimizer = part.make([WeightGroup(kind, [weight], 0.0) for kind, weight in weights.items()], 1e-3)
    materialize_state(optimizer, [*weights.values()])
    return {kind: state_bytes(optimizer.state[weight]) for kind, weight in weights.items()}


def state_bytes(state: Mapping[str, object]) -> int:
    """Return the bytes of the tensors in a weight's state."""
    return sum(value.nbytes for value in state.values() if isinstance(value, Tensor))


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

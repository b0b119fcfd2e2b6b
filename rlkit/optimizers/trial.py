"""What is checked and measured of every optimizer before a run: a step of a few numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

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


PROBE = 128
"""Rows and columns of the smallest weights by which state is measured."""


def state_size(part: Optimizer) -> Callable[[WeightKind, Sequence[int]], float]:
    """Return a function from a weight's kind and shape to the bytes of state that an optimizer keeps of it.

    It is measured for four matrices and linear in rows and in columns: right for whatever keeps numbers for each
    element, row, column or weight.

    Raises:
        Exception: The part's own code did.
    """
    small, wide, tall, large = (_measured(part, r, c) for r in (PROBE, 2 * PROBE) for c in (PROBE, 2 * PROBE))

    def size(kind: WeightKind, shape: Sequence[int]) -> float:
        x, y = prod(shape[:1]) / PROBE - 1, prod(shape[1:]) / PROBE - 1
        both = large[kind] - wide[kind] - tall[kind] + small[kind]
        return small[kind] + x * (tall[kind] - small[kind]) + y * (wide[kind] - small[kind]) + x * y * both

    return size


def _measured(part: Optimizer, rows: int, columns: int) -> dict[WeightKind, int]:
    """Return the bytes of state of a matrix of each kind, and of a vector."""
    matrix = (rows, columns)
    shapes = {WeightKind.MATRIX: matrix, WeightKind.EMBEDDING: matrix, WeightKind.VECTOR: matrix[:1]}
    weights = {kind: nn.Parameter(torch.zeros(shape)) for kind, shape in shapes.items()}
    made = part.make([WeightGroup(kind, [weight], 0.0) for kind, weight in weights.items()], 1e-3)
    materialize_state(made, [*weights.values()])
    return {kind: state_bytes(made.state[weight]) for kind, weight in weights.items()}


def state_bytes(state: Mapping[str, object]) -> int:
    """Return the bytes of the tensors in a weight's state."""
    return sum(value.nbytes for value in state.values() if isinstance(value, Tensor))


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

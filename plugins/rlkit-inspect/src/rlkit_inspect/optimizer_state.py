"""The bytes of an optimizer's state, measured on small weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor, nn

from rlkit.interfaces.optimizer import Optimizer, WeightGroup, WeightKind
from rlkit.models.optimizer_state import materialize_state

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

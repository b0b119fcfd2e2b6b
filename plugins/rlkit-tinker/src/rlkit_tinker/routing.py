"""A linear layer with the adapters of several tenants: each row of a batch has its own adapter, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rlkit.ops.attention import autocasted
from rlkit.ops.autograd import Context

Selection = slice | Tensor
"""Rows or tokens of a batch: a slice, or their indices [n] i64."""


class LoraPair(NamedTuple):
    """The matrices of an adapter in a linear layer (Hu et al. 2021, arXiv:2106.09685): W + scale * up @ down.

    Args:
        down: [R,I], A of the paper.
        up: [O,R], B of the paper.
        scale: alpha / rank.
    """

    down: Tensor
    up: Tensor
    scale: float


Pairs = Mapping[str, LoraPair]
"""The matrices of an adapter by the names of the layers."""


class Route:
    """Which rows of a batch each adapter changes.

    Args:
        owners: The adapter of each row; None for the base alone. Rows of one adapter are best beside each other.
        device: The device of the batch.
    """

    def __init__(self, owners: Sequence[Pairs | None], device: torch.device) -> None:
        self.rows = len(owners)
        indices: dict[int, list[int]] = {}
        for index, pairs in enumerate(owners):
            indices.setdefault(id(pairs), []).append(index)
        groups = [(owners[rows[0]], _selection(rows, device)) for rows in indices.values()]
        self._groups: list[tuple[Pairs, Selection]] = [(pairs, rows) for pairs, rows in groups if pairs is not None]

    def add(self, layer: str, x: Tensor, y: Tensor) -> Tensor:
        """Return the output of a layer with adapters.

        Args:
            layer: The layer's name.
            x: [...,I], its input, in which each row has equally many tokens.
            y: [...,O], the output of the base.
        """
        groups = [(pairs[layer], rows) for pairs, rows in self._groups if layer in pairs]
        if not groups:
            return y
        tokens, outputs = autocasted(x).reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        count = len(tokens) // self.rows
        selections = [_tokens(rows, count) for _, rows in groups]
        weights = [weight for pair, _ in groups for weight in (pair.down, pair.up)]
        scales = [pair.scale for pair, _ in groups]
        out: Tensor = _RoutedUpdate.apply(tokens, outputs, selections, scales, *weights)
        return out.view_as(y)


def _selection(rows: Sequence[int], device: torch.device) -> Selection:
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)


def _tokens(rows: Selection, count: int) -> Selection:
    """Return the tokens of rows, each of which has `count`."""
    if isinstance(rows, slice):
        return slice(rows.start * count, rows.stop * count)
    return (rows[:, None] * count + torch.arange(count, device=rows.device)).flatten()


class _RoutedContext(Context, Protocol):
    selections: Sequence[Selection]
    scales: Sequence[float]


class _RoutedUpdate(torch.autograd.Function):
    """y + s B A x for the rows of each adapter; with the gradient dy, dA = s (dy B)^T x and dB = s dy^T (x A^T).

    Each gradient is a product over the rows of its adapter alone: numbers of one tenant, finite or not, reach no other.
    """

    @staticmethod
    def forward(
        ctx: _RoutedContext,
        x: Tensor,
        y: Tensor,
        selections: Sequence[Selection],
        scales: Sequence[float],
        *weights: Tensor,
    ) -> Tensor:
        out = y.clone()
        projections = []
        for selection, scale, down, up in zip(selections, scales, weights[::2], weights[1::2], strict=True):
            projection = (x[selection] @ down.to(x.dtype).T).mul_(scale)
            _add_product(out, selection, projection, up.to(x.dtype).T)
            projections.append(projection)
        ctx.save_for_backward(x, *weights, *projections)
        ctx.selections, ctx.scales = selections, scales
        return out

    @staticmethod
    def backward(ctx: _RoutedContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        count = len(ctx.scales)
        weights, projections = saved[: 2 * count], saved[2 * count :]
        d_x = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
        d_weights = []
        groups = zip(ctx.selections, ctx.scales, weights[::2], weights[1::2], projections, strict=True)
        for selection, scale, down, up, projection in groups:
            d_out = grad[selection].to(x.dtype)
            d_projection = (d_out @ up.to(x.dtype)).mul_(scale)
            d_weights += [(d_projection.T @ x[selection]).to(down.dtype), (d_out.T @ projection).to(up.dtype)]
            if d_x is not None:
                _add_product(d_x, selection, d_projection, down.to(x.dtype))
        return d_x, grad, None, None, *d_weights


def _add_product(target: Tensor, selection: Selection, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to the selected tokens of a tensor [N,C]."""
    if isinstance(selection, slice) and target.dtype == left.dtype:
        target[selection].addmm_(left, right)
    elif isinstance(selection, slice):
        target[selection].add_(left @ right)
    else:
        target.index_add_(0, selection, (left @ right).to(target.dtype))

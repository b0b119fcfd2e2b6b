"""A linear layer with the adapters of several tenants: each row of a batch has its own adapter, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rlkit.ops.attention import autocasted
from rlkit.ops.autograd import Context

Selection = slice | Tensor
"""Rows of a batch: a slice, which is a view, or their indices [n] i64."""


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
        x_rows, y_rows = (z.reshape(self.rows, -1, z.shape[-1]) for z in (autocasted(x), y))
        weights = [weight for pair, _ in groups for weight in (pair.down, pair.up)]
        selections, scales = [rows for _, rows in groups], [pair.scale for pair, _ in groups]
        out: Tensor = _RoutedUpdate.apply(x_rows, y_rows, selections, scales, *weights)
        return out.view_as(y)


def _selection(rows: Sequence[int], device: torch.device) -> Selection:
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)


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
        for rows, scale, down, up in zip(selections, scales, weights[::2], weights[1::2], strict=True):
            hidden = _flat(x, rows) @ down.to(x.dtype).T
            update = (hidden @ up.to(x.dtype).T).mul_(scale)
            _add(out, rows, update)
            projections.append(hidden)
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
        for rows, scale, down, up, hidden in groups:
            d_rows = _flat(grad, rows).to(x.dtype)
            d_hidden = (d_rows @ up.to(x.dtype)).mul_(scale)
            d_weights += [(d_hidden.T @ _flat(x, rows)).to(down.dtype), (d_rows.T @ hidden).mul_(scale).to(up.dtype)]
            if d_x is not None:
                _add(d_x, rows, d_hidden @ down.to(x.dtype))
        return d_x, grad, None, None, *d_weights


def _flat(x: Tensor, rows: Selection) -> Tensor:
    """Return the tokens [n*T,C] of rows of [R,T,C]."""
    return x[rows].reshape(-1, x.shape[-1])


def _add(x: Tensor, rows: Selection, update: Tensor) -> None:
    """Add the tokens [n*T,C] of an update to rows of [R,T,C]."""
    tokens = update.view(-1, *x.shape[1:]).to(x.dtype)
    if isinstance(rows, slice):
        x[rows] += tokens
    else:
        x.index_add_(0, rows, tokens)

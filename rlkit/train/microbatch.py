"""Micro-batches: rows of a batch in passes of bounded size, as many on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from rlkit.ops.batching import group_micro_batches, micro_batches
from rlkit.types import RolloutBatch

B = TypeVar("B", bound=RolloutBatch)

Agree = Callable[[float], float]
"""Returns the largest of all ranks' values: `Ranks.all_reduce_max`."""

Forward = Callable[[Tensor, Tensor, RolloutBatch], Sequence[Tensor]]
"""From tokens and mask [b,t], and the rows of the batch from which they are, to tensors [b,t,...]."""


@torch.no_grad()
def forward_in_micro_batches(
    fn: Forward, batch: RolloutBatch, limit: int, agree: Agree, *, packed: bool = False
) -> list[Tensor]:
    """Compute tensors [B,T,...] without a gradient, micro-batch by micro-batch.

    Args:
        fn: Called as often on every rank, and once at least; with a dummy row where a rank has no rows left.
        batch: All rows of it.
        limit: Tokens of a micro-batch that are computed, padding included.
        agree: Over all ranks.
        packed: Whether `fn` packs rows: see `PackedPasses`.
    """
    outputs: list[Tensor] = []
    for rows in aligned_micro_batches(batch, range(len(batch)), limit, agree, packed) or [[]]:
        part, tokens, mask = select_rows(batch, rows)
        pieces = fn(tokens, mask, part)
        outputs = outputs or [piece.new_zeros(*batch.tokens.shape, *piece.shape[2:]) for piece in pieces]
        for output, piece in zip(outputs, pieces if rows else (), strict=bool(rows)):
            output[rows, : piece.shape[1]] = piece
    return outputs


def aligned_micro_batches(
    batch: RolloutBatch,
    rows: Sequence[int],
    limit: int,
    agree: Agree,
    packed: bool = False,
    *,
    whole_groups: bool = False,
) -> list[list[int]]:
    """Divide rows into micro-batches, as many on every rank: a rank with fewer gets empty ones at the end.

    With `packed`, there is no padding, prompts that rows share are computed once, and a group's rows stay together
    unless it alone exceeds the limit; with `whole_groups` they always do.
    """
    chosen = list(rows)
    lengths, groups = batch.attention[chosen].sum(-1), batch.group[chosen].tolist()
    if packed and chosen:
        prompts = (batch.mask[chosen].int().argmax(-1) - 1).clamp(min=0)
        answers = (lengths - prompts).tolist()
        parts = group_micro_batches(groups, prompts.tolist(), answers, limit, divide=not whole_groups)
    else:
        parts = micro_batches(lengths.tolist(), limit, groups if whole_groups else None)
    micros = [[chosen[i] for i in part] for part in parts]
    return micros + [[]] * (int(agree(len(micros))) - len(micros))


def select_rows(batch: B, rows: Sequence[int]) -> tuple[B, Tensor, Tensor]:
    """Return some rows with their tokens and mask; for no rows, a dummy row that keeps sharded ranks in lockstep."""
    part = batch.rows(torch.tensor(rows, dtype=torch.long, device=batch.tokens.device))
    if rows:
        return part, part.tokens, part.mask
    return replace(part, candidates=None), part.tokens.new_zeros(1, 2), part.mask.new_zeros(1, 2)

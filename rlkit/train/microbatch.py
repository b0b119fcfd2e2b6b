"""Micro-batches: rows of a batch in passes of bounded size, as many on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from rlkit.ops.batching import micro_batches
from rlkit.types import RolloutBatch

B = TypeVar("B", bound=RolloutBatch)

Agree = Callable[[float], float]
"""Returns the largest of all ranks' values: `Ranks.all_reduce_max`."""

Forward = Callable[[Tensor, Tensor], Sequence[Tensor]]
"""From tokens and mask [b,t] to tensors [b,t]."""


class MicroBatcher(NamedTuple):
    """How rows are divided into micro-batches, as many on every rank.

    Args:
        limit: Tokens of a micro-batch that are computed, padding included.
        agree: Over all ranks.
    """

    limit: int
    agree: Agree

    def divide(self, batch: RolloutBatch, rows: Sequence[int], shared: bool) -> list[list[int]]:
        """Divide rows of a batch; a rank with fewer micro-batches than others gets empty ones at the end.

        Args:
            batch: What the rows are from.
            rows: Their places.
            shared: Whether prompts that rows share are computed once: see `Prefixes`.
        """
        part = batch.rows(torch.tensor(list(rows), dtype=torch.long, device=batch.tokens.device))
        lengths = part.attention.sum(-1)
        if shared and rows:
            before = (part.mask.int().argmax(-1) - 1).clamp(min=0)
            answers = ((lengths - before) / (1 - WASTE)).tolist()
            micros = group_micro_batches(part.group.tolist(), before.tolist(), answers, self.limit)
        else:
            micros = micro_batches(lengths.tolist(), self.limit)
        found = [[rows[i] for i in micro] for micro in micros]
        return found + [[]] * (int(self.agree(len(found))) - len(found))


@torch.no_grad()
def forward_in_micro_batches(
    fn: Forward, batch: RolloutBatch, micros: Sequence[list[int]], *, count: int = 1
) -> list[Tensor]:
    """Compute `count` tensors [B,T] f32 without a gradient, micro-batch by micro-batch.

    Args:
        fn: Called as often on every rank; with a dummy row where a rank has no rows left.
        batch: All rows of it.
        micros: From `MicroBatcher`.
        count: How many tensors `fn` returns.
    """
    found = [torch.zeros_like(batch.rollout_logps) for _ in range(count)]
    for rows in micros:
        _, tokens, mask = select_rows(batch, rows)
        pieces = fn(tokens, mask)
        for whole, piece in zip(found, pieces if rows else (), strict=bool(rows)):
            whole[rows, : piece.shape[1]] = piece
    return found


def select_rows(batch: B, rows: Sequence[int]) -> tuple[B, Tensor, Tensor]:
    """Return some rows with their tokens and mask; for no rows, a dummy row that keeps sharded ranks in lockstep."""
    part = batch.rows(torch.tensor(rows, dtype=torch.long, device=batch.tokens.device))
    if rows:
        return part, part.tokens, part.mask
    return part, part.tokens.new_zeros(1, 2), part.mask.new_zeros(1, 2)

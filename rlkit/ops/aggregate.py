"""Weights that reduce per-token losses by global counts: invariant to the split into micro-batches and ranks."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal[
    "token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm",
    "prompt_mean_token_mean",
]  # fmt: skip
"""How tokens and sequences are weighted."""


def weights(
    mask: Tensor,
    mode: Aggregation,
    *,
    tokens: Tensor | float | None = None,
    sequences: Tensor | float | None = None,
    budget: float | None = None,
) -> Tensor:
    """Return token weights [B,T] f32 such that the loss is `(per_token * weights).sum()`.

    Args:
        mask: [B,T] bool, True where the policy chose the token.
        mode: How tokens and sequences are weighted.
        tokens: Number of tokens under the mask in the global mini-batch (all ranks, all micro-batches). For
            `prompt_mean_token_mean` [B,1]: the number for the row's prompt, times the number of prompts.
        sequences: Number of sequences in the global mini-batch.
        budget: Constant divisor of `seq_mean_token_sum_norm`: the response budget (Dr. GRPO).

    Raises:
        ValueError: A count that the mode divides by is missing.
    """
    counted = mask.float()
    if mode == "token_sum":
        return counted
    if mode in ("token_mean", "prompt_mean_token_mean"):
        return counted / _count(tokens, "tokens", mode)
    per_sequence = counted / _count(sequences, "sequences", mode)
    if mode == "seq_mean_token_sum":
        return per_sequence
    if mode == "seq_mean_token_sum_norm":
        return per_sequence / _count(budget, "budget", mode)
    return per_sequence / counted.sum(-1, keepdim=True).clamp(min=1)


def _count(value: Tensor | float | None, name: str, mode: Aggregation) -> Tensor | float:
    if value is None:
        raise ValueError(f"aggregation {mode} divides by `{name}`, which is None")
    return torch.clamp(value, min=1) if isinstance(value, Tensor) else max(value, 1)

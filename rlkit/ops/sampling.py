"""Sampling tokens from logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Truncation(NamedTuple):
    """Which tokens may be chosen, by their probabilities at the temperature.

    Args:
        top_p: [N] f32 in (0, 1]: the smallest set of tokens with this mass; 1 keeps all.
        top_k: [N] i64: the most likely k; 0 keeps all.
        min_p: [N] f32 in [0, 1]: those at least this share of the most likely one's probability; 0 keeps all.
    """

    top_p: Tensor
    top_k: Tensor
    min_p: Tensor

    def cuts(self) -> bool:
        """Return whether any row's tokens are truncated."""
        return bool(((self.top_p < 1) | (self.top_k > 0) | (self.min_p > 0)).any())


def choose(logits: Tensor, u: Tensor, temperature: Tensor, truncation: Truncation) -> tuple[Tensor, Tensor]:
    """Choose one token a row by the inverse of the cumulative distribution.

    Args:
        logits: [N,V], any float type; read as float32.
        u: [N] uniform numbers in (0, 1).
        temperature: [N] f32; 0 takes the most likely token (the first of equals) and its log-prob at temperature 1.
        truncation: Which tokens may be chosen.

    Returns:
        tokens [N] i64 and their log-probs [N] f32 under `log_softmax(logits / temperature)`, before any truncation.
    """
    greedy = temperature == 0
    logps = torch.log_softmax(logits.float() / temperature.masked_fill(greedy, 1.0)[:, None], dim=-1)
    probs = logps.exp()
    if truncation.cuts():
        probs = truncate(probs, truncation)
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    target = u.to(torch.float64) * cumulative[:, -1]
    tokens = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(-1)
    tokens = torch.where(greedy, logps.argmax(-1), tokens.clamp(max=logits.shape[-1] - 1))
    return tokens, logps.gather(-1, tokens[:, None]).squeeze(-1)


def truncate(probs: Tensor, truncation: Truncation) -> Tensor:
    """Zero the probabilities [N,V] of the tokens that may not be chosen."""
    top_p, top_k, min_p = (limit[:, None] for limit in truncation)
    ordered, index = probs.sort(dim=-1, descending=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    beyond_k = (rank[None] >= top_k) & (top_k > 0)
    mass_before = ordered.cumsum(-1) - ordered
    beyond_p = (mass_before >= top_p) & (top_p < 1)
    kept = ordered.masked_fill(beyond_k | beyond_p | (ordered < min_p * ordered[:, :1]), 0.0)
    return torch.zeros_like(probs).scatter(-1, index, kept)

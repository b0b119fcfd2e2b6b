"""Sampling tokens from logits."""

from __future__ import annotations

import torch
from torch import Tensor


def choose(logits: Tensor, u: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor) -> tuple[Tensor, Tensor]:
    """Choose one token a row by the inverse of the cumulative distribution.

    Args:
        logits: [N,V], any float type; read as float32.
        u: [N] uniform numbers in (0, 1).
        temperature: [N] f32; 0 takes the most likely token (the first of equals) and its log-prob at temperature 1.
        top_p: [N] f32 in (0, 1]; 1 keeps all tokens.
        top_k: [N] i64; 0 keeps all tokens.

    Returns:
        tokens [N] i64 and their log-probs [N] f32 under `log_softmax(logits / temperature)`, before any truncation.
    """
    greedy = temperature == 0
    logps = torch.log_softmax(logits.float() / temperature.masked_fill(greedy, 1.0)[:, None], dim=-1)
    probs = logps.exp()
    if bool((top_p < 1).any()) or bool((top_k > 0).any()):
        probs = truncate(probs, top_p, top_k)
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    target = u.to(torch.float64) * cumulative[:, -1]
    tokens = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(-1)
    tokens = torch.where(greedy, logps.argmax(-1), tokens.clamp(max=logits.shape[-1] - 1))
    return tokens, logps.gather(-1, tokens[:, None]).squeeze(-1)


def truncate(probs: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Zero the probabilities [N,V] outside the k largest and outside the smallest set with mass `top_p`."""
    ordered, index = probs.sort(dim=-1, descending=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    beyond_k = (rank[None] >= top_k[:, None]) & (top_k[:, None] > 0)
    mass_before = ordered.cumsum(-1) - ordered
    beyond_p = (mass_before >= top_p[:, None]) & (top_p[:, None] < 1)
    kept = ordered.masked_fill(beyond_k | beyond_p, 0.0)
    return torch.zeros_like(probs).scatter(-1, index, kept)

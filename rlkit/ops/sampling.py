"""Sampling tokens from logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 512
"""Tokens of the vocabulary whose probabilities are summed at once."""


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

    Probabilities are summed in blocks of the vocabulary, and then within the block that is chosen: unlike one float32
    sum over all of it, this is exact for the least likely tokens too.

    Args:
        logits: [N,V], any float type; read as float32.
        u: [N] uniform numbers in (0, 1).
        temperature: [N] f32; 0 takes the most likely token (the first of equals) and its log-prob at temperature 1.
        truncation: Which tokens may be chosen.

    Returns:
        tokens [N] i64 and their log-probs [N] f32 under `log_softmax(logits / temperature)`, before any truncation.
    """
    rows, vocabulary = logits.shape
    greedy = temperature == 0
    scale = temperature.masked_fill(greedy, 1.0)
    highest = logits.amax(-1, keepdim=True).float()
    weights = highest.new_zeros(rows, -(-vocabulary // BLOCK) * BLOCK)
    used = torch.sub(logits, highest, out=weights[:, :vocabulary])
    if bool((scale != 1).any()):
        used /= scale[:, None]
    used.exp_()
    total = weights.view(rows, -1, BLOCK).sum(-1)
    whole = total.double().sum(-1)
    if truncation.cuts():
        used.copy_(truncate(used / whole[:, None].float(), truncation))
        total = weights.view(rows, -1, BLOCK).sum(-1)
    block, rest = _place(total, u.double())
    inside = weights.view(rows, -1, BLOCK)[torch.arange(rows, device=logits.device), block]
    tokens = block * BLOCK + _place(inside, rest)[0]
    if bool(greedy.any()):
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    chosen = logits.gather(-1, tokens[:, None]).float()
    return tokens, ((chosen - highest).squeeze(-1) / scale - whole.log()).float()


def _place(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return where a share u [N] of the weights [N,K] lies, and which share of that weight is still below it."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    below_all = cumulative[:, -1] * (1 - 2.0**-52)  # u may be 1 after rounding
    target = torch.minimum(u * cumulative[:, -1], below_all)[:, None]
    place = torch.searchsorted(cumulative, target, right=True)
    weight = weights.gather(-1, place).double()
    share = (target - (cumulative.gather(-1, place) - weight)) / weight
    return place.squeeze(-1), share.squeeze(-1).clamp(0, 1)


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

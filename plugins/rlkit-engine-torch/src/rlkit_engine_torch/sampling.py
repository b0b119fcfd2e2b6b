"""Sampling tokens from logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlkit.ops.fusion import Fused

BLOCK = 512
"""Tokens of the vocabulary whose probabilities are summed at once."""


class Truncation(NamedTuple):
    """Which tokens may be sampled, by their probabilities at the temperature.

    Args:
        top_p: [N] f32 in (0, 1]: the smallest set of tokens with this mass; 1 keeps all.
        top_k: [N] i64: the k most likely tokens; 0 keeps all.
        min_p: [N] f32 in [0, 1]: tokens of at least this share of the highest probability; 0 keeps all.
    """

    top_p: Tensor
    top_k: Tensor
    min_p: Tensor


class SampledTokens(NamedTuple):
    """Sampled tokens.

    Args:
        tokens: [N] i64.
        logps: [N] f32 under `log_softmax(logits / temperature)`; over the candidates only in rows with `top_k`. NaN in
            rows whose logits contain NaN or infinity, or are all minus infinity.
        candidates: [N,K] i64, K the largest `top_k`: the tokens of which each was sampled, the likeliest first, then
            -1. Only -1 in rows without `top_k`; None if no row has it.
    """

    tokens: Tensor
    logps: Tensor
    candidates: Tensor | None = None


def choose(
    logits: Tensor,
    u: Tensor,
    temperature: Tensor | None = None,
    truncation: Truncation | None = None,
    largest_k: int = 0,
    *,
    greedy: bool = True,
) -> SampledTokens:
    """Sample one token per row by the inverse of the cumulative distribution; the host does not wait for the device.

    Probabilities are summed in blocks of the vocabulary, then within the selected block: unlike one float32 sum over
    the vocabulary, this is exact for the least likely tokens too.

    Args:
        logits: [N,V], any float type; read as float32.
        u: [N] uniform numbers in (0, 1).
        temperature: [N] f32; 0 takes the most likely token (the first of equals) and its log-prob at temperature 1.
            None is 1 for all rows.
        truncation: Which tokens may be sampled; None for all.
        largest_k: The largest `top_k` of the rows.
        greedy: Whether a temperature may be 0.
    """
    vocabulary = logits.shape[-1]
    width = vocabulary if vocabulary <= 2 * BLOCK else BLOCK
    scale = None if temperature is None else temperature.masked_fill(temperature == 0, 1.0)[:, None]
    highest, sums, weights = block_sums(logits, scale, width, width == vocabulary or truncation is not None)
    sums = sums.double()
    normalizer = sums.sum(-1)  # [N] f64
    log_normalizer, candidates = normalizer.log(), None
    if truncation is not None:
        assert weights is not None
        weights = truncate(weights / normalizer[:, None].float(), truncation)
        sums = _sum_blocks(weights, width).double()
        if largest_k:
            probs, ids = weights.topk(min(largest_k, vocabulary), -1)
            recorded = truncation.top_k > 0
            candidates = ids.masked_fill((probs == 0) | ~recorded[:, None], -1)
            log_normalizer += probs.double().sum(-1).log().where(recorded, 0)
    target = u.double() * sums.sum(-1)  # [N], the cumulative weight to reach
    if width == vocabulary:
        assert weights is not None
        tokens = _search(weights, target)[0]
    else:
        block, target = _search(sums, target)
        columns = block[:, None] * width + torch.arange(width, device=block.device)
        inside = columns.clamp(max=vocabulary - 1)
        part = _weights(logits.gather(-1, inside), highest, scale) if weights is None else weights.gather(-1, inside)
        tokens = block * width + _search(part.masked_fill(columns >= vocabulary, 0), target)[0]
        tokens.clamp_(max=vocabulary - 1)  # out of range only if sums are NaN
    if temperature is not None and greedy:
        tokens = torch.where(temperature == 0, logits.argmax(-1), tokens)
    chosen = _scaled(logits.gather(-1, tokens[:, None]).float() - highest, scale).squeeze(-1)
    return SampledTokens(tokens, (chosen - log_normalizer).float(), candidates)


@Fused
def block_sums(
    logits: Tensor, scale: Tensor | None, width: int, keeps_weights: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sum the weights `exp((logits - highest) / scale)` of logits [N,V], block by block.

    Args:
        logits: Of any float type.
        scale: [N,1] f32; None is 1.
        width: The tokens of a block; the last one may have fewer.
        keeps_weights: Whether the weights are returned too.

    Returns:
        The highest logit [N,1] of each row, the sums [N,K], and the weights [N,V], all f32.
    """
    highest = logits.amax(-1, keepdim=True).float()
    weights = _weights(logits, highest, scale)
    return highest, _sum_blocks(weights, width), weights if keeps_weights else None


def _weights(logits: Tensor, highest: Tensor, scale: Tensor | None) -> Tensor:
    return _scaled(logits - highest, scale).exp_()


def _scaled(shifted: Tensor, scale: Tensor | None) -> Tensor:
    return shifted if scale is None else shifted.div_(scale)


def _sum_blocks(weights: Tensor, width: int) -> Tensor:
    """Return the sums [N,K] of weights [N,V] in blocks of a width; the last one may be smaller."""
    if weights.shape[-1] == width:
        return weights.sum(-1, keepdim=True)
    filled = weights.shape[-1] // width * width
    blocks, rest = weights[:, :filled].view(len(weights), -1, width), weights[:, filled:]
    sums = blocks.sum(-1)
    return torch.cat((sums, rest.sum(-1, keepdim=True)), -1) if rest.shape[-1] else sums


def _search(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index [N] at which the cumulative weights [N,K] exceed the target [N], and the remainder within it."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = torch.minimum(target, cumulative[:, -1] * (1 - 2.0**-52))[:, None]  # rounding may make it the full sum
    index = torch.searchsorted(cumulative, target, right=True)
    index.clamp_(max=weights.shape[-1] - 1)  # out of range only if sums are NaN; on a GPU it would end the process
    before = cumulative.gather(-1, index) - weights.gather(-1, index)
    return index.squeeze(-1), (target - before).squeeze(-1).clamp_(min=0)


def truncate(probs: Tensor, truncation: Truncation) -> Tensor:
    """Return probabilities [N,V] with those of the excluded tokens set to 0."""
    top_p, top_k, min_p = (limit[:, None] for limit in truncation)
    ordered, index = probs.sort(dim=-1, descending=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    beyond_k = (rank[None] >= top_k) & (top_k > 0)
    mass_before = ordered.cumsum(-1) - ordered
    beyond_p = (mass_before >= top_p) & (top_p < 1)
    truncated = ordered.masked_fill(beyond_k | beyond_p | (ordered < min_p * ordered[:, :1]), 0.0)
    return torch.zeros_like(probs).scatter(-1, index, truncated)

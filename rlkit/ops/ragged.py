"""Attention over packed segments with torch's own kernels, for GPUs and other devices."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlkit.ops.attention import Layout, Scoring, autocasted, divide_by_length, equally_wide, token_indices
from rlkit.ops.autograd import Context


class Ragged(NamedTuple):
    """Inputs of a kernel for sequences of variable length.

    Args:
        query_starts: [S+1] i32, where each segment's queries start, and the end of the last.
        key_starts: [S+1] i32, the same for the keys of `KeyCopies`.
        max_queries: The largest number of queries of a segment.
        max_keys: The largest number of keys of a segment.
    """

    query_starts: Tensor
    key_starts: Tensor
    max_queries: int
    max_keys: int


class Padded(NamedTuple):
    """Segments of similar length, padded to one length.

    Args:
        queries: [B,L] i64, indices of the queries in the packed sequence.
        valid: [B,L] bool, which of them are not padding.
        keys: [B,K] i64, indices of the keys.
        mask: [B,1,L,K] bool, which keys each query attends to.
    """

    queries: Tensor
    valid: Tensor
    keys: Tensor
    mask: Tensor


def ragged_attention(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, layout: Layout) -> Tensor:
    """Return the same as `packed_attention`, on any device and with soft caps.

    In half precision on a GPU, flash attention needs no padding; it knows neither sinks nor soft caps.
    """
    query, key, value = (autocasted(x) for x in (query, key, value))
    half = query.is_cuda and query.dtype in {torch.bfloat16, torch.float16}
    if not half or scoring.sinks is not None or scoring.softcap is not None:
        return by_sdpa(query, key, value, scoring, layout)
    query, key, wide = equally_wide(query, key, value)
    return by_flash(query, key, wide, scoring, layout)[..., : value.shape[-1]]


def by_flash(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, layout: Layout) -> Tensor:
    """Attend by flash attention, to keys that are copied for each segment."""
    from torch.nn.attention.varlen import varlen_attn

    if layout.shared:
        key, value = (KeyCopies.apply(x, layout) for x in (key, value))  # type: ignore[no-untyped-call]
    before = -1 if scoring.window is None else scoring.window - 1
    # a segment's last query attends to all of its keys, and each earlier query to one key less
    options: dict[str, object] = {"scale": scoring.scale, "window_size": (before, 0)}
    if _supports_gqa(varlen_attn):
        options["enable_gqa"] = True
    else:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    return varlen_attn(query, key, value, *layout.derived(ragged_of), **options)  # type: ignore[arg-type, return-value]


class KeyCopies(torch.autograd.Function):
    """Copies keys [N,...] for each segment that attends to them.

    The gradient of an index would sort it in each layer.
    """

    @staticmethod
    def forward(ctx: Context, key: Tensor, layout: Layout) -> Tensor:
        keys, *indices = layout.derived(copies_of)
        ctx.save_for_backward(*indices)
        return key.index_select(0, keys)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        first, repeated, copies, is_copy = ctx.saved_tensors
        copied = grad.flatten(1).index_select(0, copies.flatten()).view(*copies.shape, -1)
        sums = torch.bmm(is_copy.to(grad.dtype), copied)  # in float32, rounded once
        return grad.index_select(0, first).index_copy_(0, repeated, sums.view(-1, *grad.shape[1:])), None


@cache
def _supports_gqa(attention: Callable[..., object]) -> bool:
    """Whether a kernel supports grouped-query attention, as torch's does from 2.12 on."""
    return "enable_gqa" in inspect.signature(attention).parameters


def by_sdpa(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, layout: Layout) -> Tensor:
    """Attend by SDPA with masks, or by `masked_softmax`, to segments of similar length at once."""
    group_size = query.shape[1] // key.shape[1]  # heads of queries for each head of keys
    indices, outputs = [], []
    for queries, valid, keys, mask in layout.derived(padded_of, layout.limiting(scoring.window)):
        inputs = (query[queries], *(x[keys].repeat_interleave(group_size, 2) for x in (key, value)))
        q, k, v = (x.transpose(1, 2) for x in inputs)
        if scoring.sinks is None and scoring.softcap is None:
            output = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scoring.scale)
        else:
            output = masked_softmax(q, k, v, scoring, mask)
        indices.append(queries[valid])
        outputs.append(output.transpose(1, 2)[valid])
    return torch.cat(outputs)[torch.cat(indices).argsort()]


def masked_softmax(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, visible: Tensor | None) -> Tensor:
    """Return the attention output [B,heads,Q,V] from scores in float32; the window is part of the mask.

    Args:
        query: [B,heads,Q,D].
        key: [B,H,K,D], where H divides the number of heads.
        value: [B,H,K,V].
        scoring: Of the layer.
        visible: [B,1,Q,K] bool, which keys a query attends to; None for its own, the last in turn, and earlier ones.
    """
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    if visible is None:
        queries, keys = query.shape[2], key.shape[2]
        visible = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    scores = (query @ key.transpose(2, 3)).float() * scoring.scale
    if scoring.softcap is not None:
        scores = (scores / scoring.softcap).tanh() * scoring.softcap
    scores = scores.masked_fill(~visible, torch.finfo(torch.float32).min)  # no NaN where a token sees nothing
    if scoring.sinks is not None:
        sinks = scoring.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1).to(value.dtype)
    output: Tensor = weights[..., : key.shape[2]] @ value
    return output


def ragged_of(layout: Layout) -> Ragged:
    """Return the kernel's inputs for a layout: each segment's keys are its prompt's, then its own."""
    query_counts = [end - start for start, end in layout.segments]
    key_counts = [end - start + n for (start, end), n in zip(layout.prompts, query_counts, strict=True)]
    query_starts, key_starts = (
        torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=layout.device)
        for counts in (query_counts, key_counts)
    )
    return Ragged(query_starts, key_starts, max(query_counts), max(key_counts))


def copies_of(layout: Layout) -> list[Tensor]:
    """Return the tokens of a layout that are its segments' keys, and the places of all N tokens among them.

    Returns:
        [K] i64 the keys, for each segment its prompt's and its own; [N] i64 the first place of each token, [S] i64 the
            tokens with several, [S,R] i64 all places of these, arbitrary where a token has less than R, and [S,1,R]
            bf16, 0 for the arbitrary ones and 1 for others.
    """
    spans = chain.from_iterable(zip(layout.prompts, layout.segments, strict=True))
    keys = torch.cat([torch.arange(start, end) for start, end in spans])
    order, counts = keys.argsort(stable=True), keys.bincount()
    first, repeated = counts.cumsum(0) - counts, (counts > 1).nonzero().squeeze(-1)
    numbers = torch.arange(int(counts.max()))
    copies = order[(first[repeated, None] + numbers).clamp(max=len(keys) - 1)]
    is_copy = (numbers < counts[repeated, None])[:, None].bfloat16()
    return [x.to(layout.device) for x in (keys, order[first], repeated, copies, is_copy)]


def padded_of(layout: Layout, window: int | None = None) -> list[Padded]:
    """Return the segments of a layout in batches of similar length, with masks for a window."""
    prompts = layout.prompts
    device = layout.device
    batches = []
    for rows in divide_by_length([end - start for start, end in layout.segments]):
        queries, valid = token_indices([layout.segments[i] for i in rows], device)
        prompt, in_prompt = token_indices([prompts[i] for i in rows], device)
        causal = torch.ones(2 * valid.shape[1:], dtype=torch.bool, device=device).tril().expand(len(rows), -1, -1)
        mask = torch.cat((in_prompt[:, None].expand(-1, causal.shape[1], -1), causal), 2)
        if window is not None:
            lengths = in_prompt.sum(1)[:, None]
            own = torch.arange(valid.shape[1], device=device).expand(len(rows), -1) + lengths
            keys = torch.cat((torch.arange(prompt.shape[1], device=device).expand(len(rows), -1), own), 1)
            mask = mask & (own[:, :, None] - keys[:, None] < window)
        batches.append(Padded(queries, valid, torch.cat((prompt, queries), 1), mask[:, None]))
    return batches

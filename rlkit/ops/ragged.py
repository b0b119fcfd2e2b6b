"""Attention over packed segments with torch's own kernels: for GPUs, and for any device."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlkit.ops.attention import Layout, autocasted, divide, places_of

Span = tuple[int, int]
"""Where tokens begin and end in a packed sequence."""


class Ragged(NamedTuple):
    """The places [K] of all segments' keys; where each segment begins among queries and keys, [S+1] i32; the most."""

    keys: Tensor
    query_starts: Tensor
    key_starts: Tensor
    most_queries: int
    most_keys: int


class Padded(NamedTuple):
    """The places of queries [B,L] and keys [B,K] of similar segments, and what is attended to, [B,1,L,K] bool."""

    queries: Tensor
    real: Tensor
    keys: Tensor
    visible: Tensor


def ragged_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, layout: Layout) -> Tensor:
    """Return the same as `packed_attention`: without padding in half precision on a GPU, with a little elsewhere."""
    query, key, value = (autocasted(x) for x in (query, key, value))
    flash = query.is_cuda and query.dtype in {torch.bfloat16, torch.float16}
    return (by_flash if flash else by_sdpa)(query, key, value, scale, layout)


def by_flash(query: Tensor, key: Tensor, value: Tensor, scale: float, layout: Layout) -> Tensor:
    """Attend by flash attention, to keys that are copied for each segment."""
    from torch.nn.attention.varlen import varlen_attn

    keys, *where = layout.derived(ragged_of)
    if layout.shared:
        key, value = key[keys], value[keys]
    # a segment's last query attends to all of its keys, and each one before it to one less
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)}
    if _shares_heads(varlen_attn):
        options["enable_gqa"] = True
    else:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    return varlen_attn(query, key, value, *where, **options)  # type: ignore[arg-type, return-value]


@cache
def _shares_heads(attention: Callable[..., object]) -> bool:
    """Whether several queries may share a head of keys in a kernel, as in torch from 2.12 on."""
    return "enable_gqa" in inspect.signature(attention).parameters


def by_sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float, layout: Layout) -> Tensor:
    """Attend by SDPA with masks, to segments of similar length at once."""
    groups, places, found = query.shape[1] // key.shape[1], [], []
    for queries, real, keys, visible in layout.derived(padded_of):
        inputs = (query[queries], *(x[keys].repeat_interleave(groups, 2) for x in (key, value)))
        q, k, v = (x.transpose(1, 2) for x in inputs)
        output = scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
        places.append(queries[real])
        found.append(output.transpose(1, 2)[real])
    return torch.cat(found)[torch.cat(places).argsort()]


def ragged_of(layout: Layout) -> Ragged:
    """Return where each segment's keys are: its prompt's before its own."""
    both = list(zip(prompts_of(layout), layout.segments, strict=True))
    keys = torch.cat([torch.arange(start, end) for pair in both for start, end in pair])
    lengths = ([end - start for _, (start, end) in both], [sum(end - start for start, end in pair) for pair in both])
    queries, seen = (torch.tensor([0, *accumulate(n)], dtype=torch.int32, device=layout.device) for n in lengths)
    return Ragged(keys.to(layout.device), queries, seen, max(lengths[0]), max(lengths[1]))


def padded_of(layout: Layout) -> list[Padded]:
    """Return the same for segments of similar length."""
    prompts, device, found = prompts_of(layout), layout.device, []
    for rows in divide([end - start for start, end in layout.segments]):
        queries, real = places_of([layout.segments[i] for i in rows], device)
        prompt, shown = places_of([prompts[i] for i in rows], device)
        causal = torch.ones(2 * real.shape[1:], dtype=torch.bool, device=device).tril().expand(len(rows), -1, -1)
        visible = torch.cat((shown[:, None].expand(-1, causal.shape[1], -1), causal), 2)
        found.append(Padded(queries, real, torch.cat((prompt, queries), 1), visible[:, None]))
    return found


def prompts_of(layout: Layout) -> list[Span]:
    """Return where the prompt of each segment begins and ends: (0, 0) where there is none."""
    found = [(0, 0)] * len(layout.segments)
    for start, end, last in layout.shared:
        for i, (first, _) in enumerate(layout.segments):
            if end <= first < last:
                found[i] = (start, end)
    return found

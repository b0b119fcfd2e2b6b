"""Attention over packed segments that may share a prompt."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlkit.ops.autograd import Context

P = ParamSpec("P")
T = TypeVar("T")

Span = tuple[int, int]
"""(start, end) of tokens in a packed sequence."""

WASTE = 0.15
"""Maximum padding of a bucket, as a share of its tokens."""


class _Bucket:
    """Spans of tokens of similar length, gathered as [B,L] with padding."""

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        indices, valid = token_indices(spans, device)
        self._shape = indices.shape
        self._indices = indices.flatten()  # [B*L] i64, those of the spans' last tokens for padding
        self._valid, self.padding = (x.flatten().nonzero().squeeze(-1) for x in (valid, ~valid))  # of [B*L]
        self._valid_indices = self._indices[self._valid]

    def gather(self, x: Tensor) -> Tensor:
        """Return the spans of x [N,...] as [B,L,...], with arbitrary tokens for padding."""
        return x.flatten(1).index_select(0, self._indices).view(*self._shape, *x.shape[1:])

    def scatter(self, target: Tensor, source: Tensor) -> None:
        """Write source [B,L,...] to the spans of target [N,...]."""
        unpadded = source.flatten(2).flatten(0, 1).index_select(0, self._valid)
        target.flatten(1).index_copy_(0, self._valid_indices, unpadded)

    def scatter_add(self, target: Tensor, source: Tensor) -> None:
        """Add source [B,L,...], which is 0 for padding, to the spans of target [N,...]."""
        target.flatten(1).index_add_(0, self._indices, source.flatten(2).flatten(0, 1))


class _Part(NamedTuple):
    """Spans of queries with the span of keys that each attends to: all of them, or those where a mask [Q,K] is 0.

    If causal, these are the same spans.
    """

    queries: _Bucket
    keys: _Bucket
    causal: bool
    mask: Tensor | None = None


class Layout:
    """Which tokens of a packed sequence attend to which.

    Args:
        segments: (start, end) of each segment, in order. A token attends to itself and to the earlier tokens of its
            segment.
        shared: (start, end, last) of each shared prompt: the tokens of the segments in [end, last) attend to the
            prompt in [start, end) too.
        device: Device of the index tensors.
        read: [N] i64, distinct tokens, among them all whose final hidden states are read; None for all. The last layer
            may skip the others.
    """

    def __init__(
        self,
        segments: Sequence[Span],
        shared: Sequence[tuple[int, int, int]],
        device: torch.device,
        read: Tensor | None = None,
    ) -> None:
        self.segments = segments
        self.shared = shared
        self.device = device
        self.read = read
        self.windows: list[int | None] = []
        """The sliding window of each attention over this sequence, in the order of the layers."""
        self._derived: dict[tuple[object, ...], object] = {}

    @cached_property
    def prompts(self) -> list[Span]:
        """The span of each segment's shared prompt; (0, 0) for a segment without one."""
        prompts = [(0, 0)] * len(self.segments)
        starts = [start for start, _ in self.segments]  # in order
        for start, end, last in self.shared:
            first, after = bisect_left(starts, end), bisect_left(starts, last)
            prompts[first:after] = [(start, end)] * (after - first)
        return prompts

    def derived(self, function: Callable[Concatenate[Layout, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return `function(self, ...)`, computed once for all layers."""
        key = (function, *args, *kwargs.items())
        if key not in self._derived:
            self._derived[key] = function(self, *args, **kwargs)
        return cast(T, self._derived[key])

    @cached_property
    def longest(self) -> int:
        """The length of the longest segment with its prompt."""
        spans = zip(self.segments, self.prompts, strict=True)
        return max((end - start + last - first for (start, end), (first, last) in spans), default=0)

    def limiting(self, window: int | None) -> int | None:
        """Return a window, or None if no row is longer."""
        return None if window is None or window >= self.longest else window


def attention_parts(layout: Layout, window: int | None) -> list[_Part]:
    """Return the parts of attention over a packed sequence, those that a window leaves."""
    limit = layout.limiting(window)
    return layout.derived(full_parts) if limit is None else layout.derived(windowed_parts, limit)


def full_parts(layout: Layout) -> list[_Part]:
    """Return the causal parts of all segments, then the parts in which segments attend to their shared prompts."""
    parts = _causal_parts(layout.segments, layout.device)
    by_prompt_length: dict[int, list[tuple[int, int, int]]] = {}
    for start, end, last in layout.shared:
        by_prompt_length.setdefault(end - start, []).append((start, end, last))
    for prompts in by_prompt_length.values():
        followers = [(end, last) for _, end, last in prompts]
        for indices in divide_by_length(_lengths(followers)):
            queries = _Bucket([followers[i] for i in indices], layout.device)
            parts.append(_Part(queries, _Bucket([prompts[i][:2] for i in indices], layout.device), False))
    return parts


def windowed_parts(layout: Layout, window: int) -> list[_Part]:
    """Return the causal parts of segments cut into pieces of a window, then the parts of what precedes the pieces.

    What precedes a piece is in the piece before, or at the end of the segment's prompt.
    """
    pieces: list[Span] = []
    preceded: dict[int, list[tuple[Span, Span]]] = {}
    for (start, end), (first, last) in zip(layout.segments, layout.prompts, strict=True):
        for begin in range(start, end, window):
            pieces.append((begin, min(begin + window, end)))
            before = (begin - window + 1, begin) if begin > start else (max(last - window + 1, first), last)
            if before[0] < before[1]:  # the last query of a whole piece sees nothing before the piece
                queries = (begin, min(begin + window - 1, end))
                preceded.setdefault(before[1] - before[0], []).append((queries, before))
    parts = _causal_parts(pieces, layout.device)
    for count, pairs in preceded.items():
        lengths = _lengths([queries for queries, _ in pairs])
        for indices in divide_by_length(lengths):
            query_bucket, key_bucket = (_Bucket([pairs[i][side] for i in indices], layout.device) for side in (0, 1))
            hidden = torch.full((lengths[indices[0]], count), -torch.inf, device=layout.device).tril(count - window)
            parts.append(_Part(query_bucket, key_bucket, False, hidden))
    return parts


def _causal_parts(spans: Sequence[Span], device: torch.device) -> list[_Part]:
    """Return the parts of spans that each attend to themselves."""
    buckets = [_Bucket([spans[i] for i in indices], device) for indices in divide_by_length(_lengths(spans))]
    return [_Part(bucket, bucket, True) for bucket in buckets]


def _lengths(spans: Sequence[Span]) -> list[int]:
    return [end - start for start, end in spans]


def token_indices(spans: Sequence[Span], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the indices [B,L] i64 of the spans' tokens in a packed sequence, and which are not padding, [B,L] bool."""
    starts, ends = torch.tensor(spans, device=device).T[:, :, None]
    indices = starts + torch.arange(int((ends - starts).max()), device=device)
    return indices.minimum(ends - 1), indices < ends


def autocasted(x: Tensor) -> Tensor:
    """Return a tensor in autocast's type; unchanged without autocast."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def divide_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Divide the indices of non-empty segments into buckets of similar length with little padding, longest first."""
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i])
    buckets: list[list[int]] = []
    used = 0
    for i in order:
        used += lengths[i]
        if buckets and used >= (1 - WASTE) * lengths[buckets[-1][0]] * (len(buckets[-1]) + 1):
            buckets[-1].append(i)
        else:
            buckets.append([i])
            used = lengths[i]
    return buckets


class Scoring(NamedTuple):
    """How a layer weighs the keys that a token attends to.

    Args:
        scale: Scale of the scores.
        window: The last of these keys that count, the token's own included; None for all.
        sinks: [heads], the score of a key without a value that all tokens attend to; None for none.
        softcap: The bound of scores, softcap * tanh(score / softcap); None for none.
    """

    scale: float
    window: int | None = None
    sinks: Tensor | None = None
    softcap: float | None = None


def packed_attention(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, layout: Layout) -> Tensor:
    """Return the attention output of a packed sequence, [N,heads,V].

    Args:
        query: [N,heads,D].
        key: [N,H,D], where H divides the number of heads.
        value: [N,H,V].
        scoring: Without a soft cap.
        layout: Which tokens each token attends to.
    """
    inputs = equally_wide(query, key, value)
    output: Tensor = _PackedAttention.apply(*inputs, scoring.sinks, scoring, layout)  # type: ignore[no-untyped-call]
    return output[..., : value.shape[-1]]


def equally_wide(*heads: Tensor) -> list[Tensor]:
    """Return tensors [...,D] of one size, as kernels want them; the scores of heads do not change by zeros."""
    size = max(x.shape[-1] for x in heads)
    return [x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1])) for x in heads]


class _AttentionContext(Context, Protocol):
    scoring: Scoring
    layout: Layout


class _PackedAttention(torch.autograd.Function):
    """Flash attention in parts, such as a token's own segment and its prompt, joined by their log-sum-exps.

    The gradient of a part needs only the joint output and log-sum-exp, as in ring attention (Liu et al. 2023,
    section 3). A sink is a part whose values are 0.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes positions)
        ctx: _AttentionContext,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        scoring: Scoring,
        layout: Layout,
    ) -> Tensor:
        query, key, value = (autocasted(x) for x in (query, key, value))
        output = torch.empty_like(widened(query), memory_format=torch.contiguous_format)  # [N,heads,D]
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)  # [N,heads]
        for queries, keys, causal, mask in attention_parts(layout, scoring.window):
            gathered = [queries.gather(query), keys.gather(key), keys.gather(value)]
            part, part_lse = _attend([widened(x) for x in gathered], causal, mask, scoring.scale)
            if not causal:
                own_lse = queries.gather(lse)
                joint_lse = torch.logaddexp(own_lse, part_lse)
                part = (part * _share(part_lse, joint_lse, output)).addcmul_(
                    queries.gather(output), _share(own_lse, joint_lse, output)
                )
                part_lse = joint_lse
            queries.scatter(output, part)
            queries.scatter(lse, part_lse)
        if sinks is not None:
            joint_lse = torch.logaddexp(lse, sinks.float())
            output *= _share(lse, joint_lse, output)
            lse = joint_lse
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, lse, sinks)
        ctx.scoring, ctx.layout = scoring._replace(sinks=None), layout
        return output

    @staticmethod
    def backward(ctx: _AttentionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, sinks = ctx.saved_tensors
        grads = [torch.zeros_like(widened(x), memory_format=torch.contiguous_format) for x in saved[:3]]
        for queries, keys, causal, mask in attention_parts(ctx.layout, ctx.scoring.window):
            buckets = (queries, keys, keys, queries, queries)
            gathered = [widened(bucket.gather(x)) for x, bucket in zip(saved, buckets, strict=True)]
            part_grad = widened(queries.gather(grad))
            part_grad.flatten(0, 1).index_fill_(0, queries.padding, 0.0)
            part_grads = _attention_grads(part_grad, gathered, causal, mask, ctx.scoring.scale)
            for target, source, bucket in zip(grads, part_grads, buckets, strict=False):
                bucket.scatter_add(target, source)
        d_sinks = None
        if sinks is not None:
            *_, output, lse = saved
            weights = (sinks.float() - lse).exp_()  # [N,heads], of the sinks
            d_sinks = -(weights * (grad.float() * output.float()).sum(-1)).sum(0).to(sinks.dtype)
        return *grads, d_sinks, None, None


def widened(x: Tensor) -> Tensor:
    """Return a tensor in float32 if it has 16 bits, in which the kernel's backward pass is 3 times slower."""
    return x.float() if x.dtype in {torch.bfloat16, torch.float16} else x


def _share(part_lse: Tensor, joint_lse: Tensor, like: Tensor) -> Tensor:
    """Return the share [...,heads,1] of a part in a joint sum of exponentials, given the logs [...,heads] of both."""
    return (part_lse - joint_lse).exp_()[..., None].to(like.dtype)


def _attend(inputs: Sequence[Tensor], causal: bool, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Return the attention output [B,Q,heads,D] and the log-sum-exps of the scores [B,Q,heads].

    Args:
        inputs: Queries [B,Q,heads,D], keys and values [B,K,H,D].
        causal: Whether a query attends only to its own key and the keys before it.
        mask: [Q,K], 0 for the keys that queries attend to, one at least, and -inf for others; None for all keys.
        scale: Scale of the scores.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    query, key, value = (x.transpose(1, 2) for x in inputs)
    output, lse = flash(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
    return output.transpose(1, 2), lse.transpose(1, 2)


def _attention_grads(
    grad: Tensor, saved: Sequence[Tensor], causal: bool, mask: Tensor | None, scale: float
) -> list[Tensor]:
    """Return the gradients of the inputs of `_attend`, given that of its output and its inputs, output and lse."""
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    inputs = [x.transpose(1, 2) for x in (grad, *saved)]
    grads = backward(*inputs, 0.0, causal, attn_mask=mask, scale=scale)
    return [x.transpose(1, 2) for x in grads]

"""Attention over packed segments that may share a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from rlkit.ops.autograd import Context

T = TypeVar("T")

WASTE = 0.15
"""Maximum padding of a bucket, as a share of its tokens."""


class _Bucket:
    """Spans of tokens of similar length, gathered as [B,L] with padding; a single span is a view."""

    def __init__(self, spans: Sequence[tuple[int, int]], device: torch.device) -> None:
        indices, valid = token_indices(spans, device)
        self._single = slice(*spans[0]) if len(spans) == 1 else None
        self._shape = indices.shape
        self._indices = indices.flatten()  # [B*L] i64, arbitrary for padding
        self._valid = valid.flatten().nonzero().squeeze(-1)  # [M] i64, the positions in [B*L] that are not padding
        self._valid_indices = self._indices[self._valid]  # [M] i64

    def gather(self, x: Tensor) -> Tensor:
        """Return the spans of x [N,...] as [B,L,...], with arbitrary tokens for padding."""
        if self._single is not None:
            return x[None, self._single]
        return x.flatten(1).index_select(0, self._indices).view(*self._shape, *x.shape[1:])

    def gather_padded(self, x: Tensor) -> Tensor:
        """Return the spans of x [N,...] as [B,L,...], with 0 for padding."""
        if self._single is not None:
            return x[None, self._single]
        padded = x.new_zeros(*self._shape, *x.shape[1:])
        padded.flatten(0, 1)[self._valid] = x[self._valid_indices]
        return padded

    def scatter(self, target: Tensor, source: Tensor) -> None:
        """Write source [B,L,...] to the spans of target [N,...]."""
        if self._single is not None:
            target[self._single] = source[0]
        else:
            target.flatten(1).index_copy_(0, self._valid_indices, self._unpadded(source))

    def scatter_add(self, target: Tensor, source: Tensor) -> None:
        """Add source [B,L,...] to the spans of target [N,...]."""
        if self._single is not None:
            target[self._single] += source[0]
        else:
            target.flatten(1).index_add_(0, self._valid_indices, self._unpadded(source))

    def _unpadded(self, source: Tensor) -> Tensor:
        return source.flatten(2).flatten(0, 1).index_select(0, self._valid)


class _Part(NamedTuple):
    """Spans of queries with the span of keys that each attends to; if causal, these are the same spans."""

    queries: _Bucket
    keys: _Bucket
    causal: bool


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
        segments: Sequence[tuple[int, int]],
        shared: Sequence[tuple[int, int, int]],
        device: torch.device,
        read: Tensor | None = None,
    ) -> None:
        self.segments = segments
        self.shared = shared
        self.device = device
        self.read = read
        self._derived: dict[Callable[[Layout], object], object] = {}

    def derived(self, function: Callable[[Layout], T]) -> T:
        """Return `function(self)`, computed once for all layers."""
        if function not in self._derived:
            self._derived[function] = function(self)
        return cast(T, self._derived[function])


def attention_parts(layout: Layout) -> list[_Part]:
    """Return the causal parts of all segments, then the parts in which segments attend to their shared prompts."""
    parts = []
    for indices in divide_by_length(_lengths(layout.segments)):
        bucket = _Bucket([layout.segments[i] for i in indices], layout.device)
        parts.append(_Part(bucket, bucket, True))
    by_prompt_length: dict[int, list[tuple[int, int, int]]] = {}
    for start, end, last in layout.shared:
        by_prompt_length.setdefault(end - start, []).append((start, end, last))
    for prompts in by_prompt_length.values():
        followers = [(end, last) for _, end, last in prompts]
        for indices in divide_by_length(_lengths(followers)):
            queries = _Bucket([followers[i] for i in indices], layout.device)
            parts.append(_Part(queries, _Bucket([prompts[i][:2] for i in indices], layout.device), False))
    return parts


def _lengths(spans: Sequence[tuple[int, int]]) -> list[int]:
    return [end - start for start, end in spans]


def token_indices(spans: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
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


def packed_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, layout: Layout) -> Tensor:
    """Return the attention output of a packed sequence, [N,heads,D].

    Args:
        query: [N,heads,D].
        key: [N,H,D], where H divides the number of heads.
        value: [N,H,D].
        scale: Scale of the scores.
        layout: Which tokens each token attends to.
    """
    return _PackedAttention.apply(query, key, value, scale, layout)  # type: ignore[no-any-return, no-untyped-call]


class _AttentionContext(Context, Protocol):
    scale: float
    layout: Layout


class _PackedAttention(torch.autograd.Function):
    """Flash attention in two parts, a token's own segment and its prompt, joined by their log-sum-exps.

    The gradient of a part needs only the joint output and log-sum-exp, as in ring attention (Liu et al. 2023,
    section 3).
    """

    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes positions)
        ctx: _AttentionContext, query: Tensor, key: Tensor, value: Tensor, scale: float, layout: Layout
    ) -> Tensor:
        query, key, value = (autocasted(x) for x in (query, key, value))
        output = torch.empty_like(widened(query), memory_format=torch.contiguous_format)  # [N,heads,D]
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)  # [N,heads]
        for queries, keys, causal in layout.derived(attention_parts):
            gathered = [queries.gather(query), keys.gather(key), keys.gather(value)]
            part, part_lse = _attend([widened(x) for x in gathered], causal, scale)
            if not causal:
                own_lse = queries.gather(lse)
                joint_lse = torch.logaddexp(own_lse, part_lse)
                part = (part * _share(part_lse, joint_lse, output)).addcmul_(
                    queries.gather(output), _share(own_lse, joint_lse, output)
                )
                part_lse = joint_lse
            queries.scatter(output, part)
            queries.scatter(lse, part_lse)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.scale, ctx.layout = scale, layout
        return output

    @staticmethod
    def backward(ctx: _AttentionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grads = [torch.zeros_like(widened(x), memory_format=torch.contiguous_format) for x in saved[:3]]
        for queries, keys, causal in ctx.layout.derived(attention_parts):
            buckets = (queries, keys, keys, queries, queries)
            gathered = [widened(bucket.gather(x)) for x, bucket in zip(saved, buckets, strict=True)]
            part_grads = _attention_grads(widened(queries.gather_padded(grad)), gathered, causal, ctx.scale)
            for target, part_grad, bucket in zip(grads, part_grads, buckets, strict=False):
                bucket.scatter_add(target, part_grad)
        return *grads, None, None


def widened(x: Tensor) -> Tensor:
    """Return a tensor in float32 if it has 16 bits, in which the kernel's backward pass is 3 times slower."""
    return x.float() if x.dtype in {torch.bfloat16, torch.float16} else x


def _share(part_lse: Tensor, joint_lse: Tensor, like: Tensor) -> Tensor:
    """Return the share [...,heads,1] of a part in a joint sum of exponentials, given the logs [...,heads] of both."""
    return (part_lse - joint_lse).exp_()[..., None].to(like.dtype)


def _attend(inputs: Sequence[Tensor], causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return the attention output [B,Q,heads,D] and the log-sum-exps of the scores [B,Q,heads].

    Args:
        inputs: Queries [B,Q,heads,D], keys and values [B,K,H,D].
        causal: Whether a query attends only to its own key and the keys before it.
        scale: Scale of the scores.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, lse = flash(*(x.transpose(1, 2) for x in inputs), 0.0, causal, scale=scale)
    return output.transpose(1, 2), lse.transpose(1, 2)


def _attention_grads(grad: Tensor, saved: Sequence[Tensor], causal: bool, scale: float) -> list[Tensor]:
    """Return the gradients of the inputs of `_attend`, given that of its output and its inputs, output and lse."""
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return [x.transpose(1, 2) for x in backward(*(x.transpose(1, 2) for x in (grad, *saved)), 0.0, causal, scale=scale)]

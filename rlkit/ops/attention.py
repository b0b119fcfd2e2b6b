"""Attention over packed segments, some of which attend to a prompt that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

WASTE = 0.15
"""Padding among segments that are computed together, as a share of their tokens."""


class _Bucket:
    """Spans of tokens of similar length, [B,L] with padding; a single one is not copied."""

    def __init__(self, spans: Sequence[tuple[int, int]], device: torch.device) -> None:
        places, real = places_of(spans, device)
        self._only = slice(*spans[0]) if len(spans) == 1 else None
        self._shape = places.shape
        self._places = places.flatten()
        """The tokens of a packed sequence, any for padding."""
        self._real = real.flatten().nonzero().squeeze(-1)
        """Where there is no padding."""
        self._tokens = self._places[self._real]

    def gather(self, x: Tensor) -> Tensor:
        """Return what [N,...] holds of the spans, [B,L,...], anything for padding."""
        if self._only is not None:
            return x[None, self._only]
        return x.flatten(1).index_select(0, self._places).view(*self._shape, *x.shape[1:])

    def gather_padded(self, x: Tensor) -> Tensor:
        """Return the same with 0 for padding."""
        if self._only is not None:
            return x[None, self._only]
        found = x.new_zeros(*self._shape, *x.shape[1:])
        found.flatten(0, 1)[self._real] = x[self._tokens]
        return found

    def scatter(self, whole: Tensor, part: Tensor) -> None:
        """Write what [B,L,...] holds of the spans to [N,...]."""
        if self._only is not None:
            whole[self._only] = part[0]
        else:
            whole.flatten(1).index_copy_(0, self._tokens, self._unpadded(part))

    def add(self, whole: Tensor, part: Tensor) -> None:
        """Add it to [N,...]."""
        if self._only is not None:
            whole[self._only] += part[0]
        else:
            whole.flatten(1).index_add_(0, self._tokens, self._unpadded(part))

    def _unpadded(self, part: Tensor) -> Tensor:
        return part.flatten(2).flatten(0, 1).index_select(0, self._real)


class _Part(NamedTuple):
    """Spans of queries, and for each the span of its keys: both the same, of which a query sees those before it."""

    queries: _Bucket
    keys: _Bucket
    causal: bool


class Layout:
    """Which tokens of a packed sequence attend to which others.

    Args:
        segments: Where each begins and ends, one after another: a token attends to those before it in its own, and to
            itself.
        shared: Where a prompt begins and ends, and where the segments right after it end, whose tokens attend to it.
        device: Where they are.
    """

    def __init__(
        self,
        segments: Sequence[tuple[int, int]],
        shared: Sequence[tuple[int, int, int]],
        device: torch.device,
    ) -> None:
        self.segments, self.shared, self.device = segments, shared, device
        self._derived: dict[Callable[[Layout], Any], Any] = {}

    def derived(self, function: Callable[[Layout], T]) -> T:
        """Return a function's value of this layout, computed once for all layers."""
        if function not in self._derived:
            self._derived[function] = function(self)
        found: T = self._derived[function]
        return found


def parts_of(layout: Layout) -> list[_Part]:
    """Return the segments in buckets of similar length, then what follows prompts of one length in such buckets."""
    whole = [_Bucket([layout.segments[i] for i in some], layout.device) for some in divide(_lengths(layout.segments))]
    found = [_Part(bucket, bucket, True) for bucket in whole]
    by_length: dict[int, list[tuple[int, int, int]]] = {}
    for start, end, last in layout.shared:
        by_length.setdefault(end - start, []).append((start, end, last))
    for alike in by_length.values():
        after = [(end, last) for _, end, last in alike]
        for some in divide(_lengths(after)):
            queries = _Bucket([after[i] for i in some], layout.device)
            found.append(_Part(queries, _Bucket([alike[i][:2] for i in some], layout.device), False))
    return found


def _lengths(spans: Sequence[tuple[int, int]]) -> list[int]:
    return [end - start for start, end in spans]


def places_of(spans: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the places [B,L] of tokens in a packed sequence, any for padding, and which [B,L] are tokens."""
    starts, ends = torch.tensor(spans, device=device).T[:, :, None]
    places = starts + torch.arange(int((ends - starts).max()), device=device)
    return places.minimum(ends - 1), places < ends


def autocasted(x: Tensor) -> Tensor:
    """Return a tensor in autocast's type, if there is one."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def divide(lengths: Sequence[int]) -> list[list[int]]:
    """Divide segments, but those of length 0, into buckets of similar length with little padding, longest first."""
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i])
    found: list[list[int]] = []
    used = 0
    for i in order:
        used += lengths[i]
        if found and used >= (1 - WASTE) * lengths[found[-1][0]] * (len(found[-1]) + 1):
            found[-1].append(i)
        else:
            found.append([i])
            used = lengths[i]
    return found


def packed_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, layout: Layout) -> Tensor:
    """Return what each token attends to, [N,heads,D].

    Args:
        query: [N,heads,D].
        key: [N,H,D], where H divides the number of heads.
        value: [N,H,D].
        scale: Of the scores.
        layout: Which tokens each attends to.
    """
    query, key, value = (autocasted(x) for x in (query, key, value))
    return _PackedAttention.apply(query, key, value, scale, layout)  # type: ignore[no-any-return, no-untyped-call]


class _PackedAttention(torch.autograd.Function):
    """Flash attention in two parts, a token's own segment and its prompt, joined by their sums of exponentials.

    The gradient of a part needs only the joint output and sum, as in ring attention (Liu et al. 2023, section 3).
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, layout: Layout) -> Tensor:  # noqa: PLR0917 (autograd passes positions)
        found = torch.empty_like(query, memory_format=torch.contiguous_format)
        totals = query.new_empty(query.shape[:2], dtype=torch.float32)
        for queries, keys, causal in layout.derived(parts_of):
            output, total = _attend([queries.gather(query), keys.gather(key), keys.gather(value)], causal, scale)
            if not causal:
                own = queries.gather(totals)
                joint = torch.logaddexp(own, total)
                output = (output * _share(total, joint, found)).addcmul_(
                    queries.gather(found), _share(own, joint, found)
                )
                total = joint
            queries.scatter(found, output)
            queries.scatter(totals, total)
        ctx.save_for_backward(query, key, value, found, totals)
        ctx.scale, ctx.layout = scale, layout
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in saved[:3]]
        for queries, keys, causal in ctx.layout.derived(parts_of):
            places = (queries, keys, keys, queries, queries)
            parts = [place.gather(x) for x, place in zip(saved, places, strict=True)]
            new = _differentiate(queries.gather_padded(grad), parts, causal, ctx.scale)
            for whole, part, place in zip(grads, new, places, strict=False):
                place.add(whole, part)
        return *grads, None, None


def _share(part: Tensor, joint: Tensor, like: Tensor) -> Tensor:
    """Return the share [n,heads,1] of a part in a joint sum, from the logarithms of both [n,heads]."""
    return (part - joint).exp_()[..., None].to(like.dtype)


def _attend(inputs: Sequence[Tensor], causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return what queries attend to and the logarithms of their sums of exponentials [B,Q,heads].

    Args:
        inputs: Queries [B,Q,heads,D], keys and values [B,K,H,D].
        causal: Whether a query attends to keys before it and its own alone.
        scale: Of the scores.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, total = flash(*(x.transpose(1, 2) for x in inputs), 0.0, causal, scale=scale)
    return output.transpose(1, 2), total.transpose(1, 2)


def _differentiate(grad: Tensor, saved: Sequence[Tensor], causal: bool, scale: float) -> list[Tensor]:
    """Return the gradients of the inputs of `_attend` from that of its output, given both and the logarithms."""
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return [x.transpose(1, 2) for x in backward(*(x.transpose(1, 2) for x in (grad, *saved)), 0.0, causal, scale=scale)]

"""Attention over packed segments, some of which attend to a prompt that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

WASTE = 0.15
"""Padding among segments that are computed together, as a share of their tokens."""


class _Bucket:
    """Segments of similar length, [B,L] with padding."""

    def __init__(self, segments: Sequence[tuple[int, int]], device: torch.device) -> None:
        starts, ends = torch.tensor(segments, device=device).T[:, :, None]
        places = starts + torch.arange(int((ends - starts).max()), device=device)
        self.shape = places.shape
        self.places = places.minimum(ends - 1).flatten()
        """The tokens of a packed sequence, any for padding."""
        self.real = (places < ends).flatten().nonzero().squeeze(-1)
        """Where there is no padding."""
        self.tokens = self.places[self.real]

    def gather(self, x: Tensor) -> Tensor:
        """Return what [N,...] holds of the segments, [B,L,...]."""
        return x.flatten(1).index_select(0, self.places).view(*self.shape, *x.shape[1:])

    def scatter(self, whole: Tensor, part: Tensor) -> None:
        """Write what [B,L,...] holds of the segments to [N,...]."""
        whole.flatten(1).index_copy_(0, self.tokens, part.flatten(2).flatten(0, 1).index_select(0, self.real))


class Layout:
    """Which tokens of a packed sequence attend to which others.

    Args:
        segments: Where each begins and ends, one after another: a token attends to those before it in its own, and to
            itself.
        shared: Where a prompt begins and ends, and where the segments right after it end, whose tokens attend to it.
        length: Tokens in all.
        device: Where they are.
    """

    def __init__(
        self,
        segments: Sequence[tuple[int, int]],
        shared: Sequence[tuple[int, int, int]],
        length: int,
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


def buckets_of(layout: Layout) -> list[_Bucket]:
    """Return the segments in buckets of similar length."""
    rows = divide([end - start for start, end in layout.segments])
    return [_Bucket([layout.segments[i] for i in some], layout.device) for some in rows]


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
        for bucket in layout.derived(buckets_of):
            output, total = _attend([bucket.gather(x) for x in (query, key, value)], True, scale)
            bucket.scatter(found, output)
            bucket.scatter(totals, total)
        for start, end, last in layout.shared:
            parts = (query[end:last], key[start:end], value[start:end])
            [output], [total] = _attend([x[None] for x in parts], False, scale)
            joint = torch.logaddexp(totals[end:last], total)
            found[end:last].mul_(_share(totals[end:last], joint, found))
            found[end:last].addcmul_(output, _share(total, joint, found))
            totals[end:last] = joint
        ctx.save_for_backward(query, key, value, found, totals)
        ctx.scale, ctx.layout = scale, layout
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in saved[:3]]
        for bucket in ctx.layout.derived(buckets_of):
            of_output = torch.zeros(*bucket.shape, *grad.shape[1:], dtype=grad.dtype, device=grad.device)
            of_output.flatten(0, 1)[bucket.real] = grad[bucket.tokens]
            new = _differentiate(of_output, [bucket.gather(x) for x in saved], True, ctx.scale)
            for whole, part in zip(grads, new, strict=True):
                bucket.scatter(whole, part)
        for start, end, last in ctx.layout.shared:
            rows, prompt = slice(end, last), slice(start, end)
            where = (rows, prompt, prompt, rows, rows)
            parts = [x[None, place] for x, place in zip(saved, where, strict=True)]
            new = _differentiate(grad[None, rows], parts, False, ctx.scale)
            for whole, part, place in zip(grads, new, where, strict=False):
                whole[place] += part[0]
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

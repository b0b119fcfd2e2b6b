"""Sequence parallelism: ranks share the tokens of rows, and in attention its heads (DeepSpeed-Ulysses, 2309.14509).

If their number does not divide the heads, heads of zeros are added for the time of the attention. Up to one head a rank
is wasted so; ring attention with causal masks leaves more of the ranks idle, unless tokens are reordered.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad, scaled_dot_product_attention

from rlkit.ops.attention import autocasted
from rlkit.ops.autograd import Context

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on the length of the sequence, of which a rank has only a slice."""


class SequenceGroup:
    """The ranks that divide the tokens of the same rows; rank r has the r-th of `size` slices of equal length.

    Args:
        group: The process group.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.size = group.size()
        self.index = group.rank()

    def slice(self, x: Tensor) -> Tensor:
        """Return this rank's slice [...,ceil(T/size)] of a tensor [...,T], which is padded with 0 to a multiple."""
        length = -(-x.shape[-1] // self.size)
        padded = pad(x, (0, length * self.size - x.shape[-1]))
        return padded[..., self.index * length : (self.index + 1) * length]

    def options(self, positions: Tensor) -> dict[str, Any]:
        """Return the arguments of a model's pass over a slice besides its tokens, whose positions are [B,L].

        The attention function replaces the mask; transformers leaves one of 4 dimensions as it is.
        """
        mask = torch.empty(1, 1, 1, 1, device=positions.device)
        return {"position_ids": positions, "attention_mask": mask, "sequence": self}

    def sum_slices(self, x: Tensor) -> Tensor:
        """Return the sum over ranks of tensors that are 0 outside of a rank's slice; all ranks must call this.

        The gradient of each rank's tensor is that of the sum: every rank computes the same loss from it.
        """
        return _SumSlices.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]

    def gather_tokens(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return [B,ceil(heads/size),T,D] of all tokens for this rank's heads; all ranks must call this.

        Args:
            query: [B,heads,L,D] of this rank's slice.
            key: [B,H,L,D], where H divides the heads of queries. Heads are repeated until `size` divides them, or until
                each query head has its own.
            value: [B,H,L,D].
        """
        heads, key_heads = query.shape[1], key.shape[1]
        padded, groups = _padded_heads(heads, key_heads, self.size)
        query = _pad_heads(query, padded, groups)
        if groups == key_heads:
            key, value = (x.repeat_interleave(self.size // gcd(key_heads, self.size), 1) for x in (key, value))
        else:
            key, value = (_pad_heads(x.repeat_interleave(heads // key_heads, 1), padded, 1) for x in (key, value))
        return [_Exchange.apply(autocasted(x), self, 1, 2) for x in (query, key, value)]  # type: ignore[no-untyped-call]

    def gather_heads(self, output: Tensor, heads: int, key_heads: int) -> Tensor:
        """Return [B,L,heads,D] of this rank's slice from [B,T,ceil(heads/size),D]; all ranks must call this.

        Args:
            output: Of the attention over what `gather_tokens` returned.
            heads: Heads of the queries that it was called with.
            key_heads: Heads of the keys.
        """
        joined: Tensor = _Exchange.apply(output, self, 1, 2)  # type: ignore[no-untyped-call]
        _, groups = _padded_heads(heads, key_heads, self.size)
        grouped = joined.reshape(*joined.shape[:2], groups, -1, joined.shape[-1])
        return grouped[:, :, :, : heads // groups].flatten(2, 3)


def _padded_heads(heads: int, key_heads: int, size: int) -> tuple[int, int]:
    """Return the least number of heads that `size` divides, and in how many groups of them heads are added.

    There are as many groups as key heads if these divide the padded number, else one.
    """
    padded = -(-heads // size) * size
    return padded, key_heads if padded % key_heads == 0 else 1


def _pad_heads(x: Tensor, padded: int, groups: int) -> Tensor:
    """Return [B,padded,L,D] from [B,heads,L,D], with heads of zeros at the end of each group."""
    missing = (padded - x.shape[1]) // groups
    if missing == 0:
        return x
    grouped = x.reshape(x.shape[0], groups, -1, *x.shape[2:])
    return pad(grouped, (0, 0, 0, 0, 0, missing)).flatten(1, 2)


class _GroupContext(Context):
    sequence: SequenceGroup
    divided: int
    joined: int


class _Exchange(torch.autograd.Function):
    """Divides a dimension among the ranks of a group, and joins what they send along another one."""

    @staticmethod
    def forward(ctx: _GroupContext, x: Tensor, sequence: SequenceGroup, divided: int, joined: int) -> Tensor:
        ctx.sequence, ctx.divided, ctx.joined = sequence, divided, joined
        return _exchange(x, sequence, divided, joined)

    @staticmethod
    def backward(ctx: _GroupContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grad, ctx.sequence, ctx.joined, ctx.divided), None, None, None


class _SumSlices(torch.autograd.Function):
    """Sums over the ranks of a group, each of which has a loss of the sum."""

    @staticmethod
    def forward(_: Context, x: Tensor, sequence: SequenceGroup) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=sequence.group)
        return total

    @staticmethod
    def backward(_: Context, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _exchange(x: Tensor, sequence: SequenceGroup, divided: int, joined: int) -> Tensor:
    outgoing = torch.stack(x.chunk(sequence.size, divided))
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=sequence.group)
    return torch.cat(incoming.unbind(), joined)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float = 0.0) -> Tensor:
    """Return the attention output [B,T,heads,D] of rows, each token of which attends to itself and earlier ones.

    Args:
        query: [B,heads,T,D].
        key: [B,H,T,D], where H divides the number of heads.
        value: [B,H,T,D].
        scale: Scale of the scores; None for 1 / sqrt(D).
        dropout: Share of the attention weights that are set to 0.
    """
    grouped = query.shape[1] != key.shape[1]
    output = scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=grouped
    )
    return output.transpose(1, 2)


def division_problem(config: Any) -> str | None:
    """Explain why the tokens of a model cannot be divided among ranks; None if nothing in its configuration forbids it.

    Args:
        config: The model's configuration.
    """
    if hasattr(config, "vision_config"):
        return "it reads pictures, whose features are no tokens that ranks could divide"
    text = config.get_text_config()
    window, context = getattr(text, "sliding_window", None), getattr(text, "max_position_embeddings", None)
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    if kinds - {"sliding_attention"}:
        return f"it has layers of {', '.join(sorted(kinds))}; only full attention can be divided"
    if (kinds or window is not None) and (window is None or context is None or window < context):
        return f"its attention has a sliding window of {window} tokens; only full attention can be divided"
    types = [section.get("rope_type") for section in rope_sections(getattr(text, "rope_parameters", None))]
    ropes = [rope for rope in LENGTH_DEPENDENT if rope in types]
    if ropes:
        return f"its rotary embedding is {', '.join(ropes)}, which depends on the length of the whole sequence"
    return None


def rope_sections(parameters: object) -> Iterator[dict[str, Any]]:
    """Yield rotary parameters, and those inside of them for each type of layers."""
    if isinstance(parameters, dict):
        yield parameters
        for section in parameters.values():
            yield from rope_sections(section)

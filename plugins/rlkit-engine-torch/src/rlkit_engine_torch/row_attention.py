"""Attention of decoded rows to the prompts that they share, and to their own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rlkit.ops.fusion import Fused
from rlkit_engine_torch.compiled import compiles

if TYPE_CHECKING:
    from rlkit.interfaces.model import ModelConfig


MIN_ELEMENTS = 2**17
"""The elements of a tensor that are worth a compilation here: what it saves is saved in each layer for each token."""


class PartialAttention(NamedTuple):
    """Attention of queries to a part of their keys.

    Weights are exp(scores - highest), with the `highest` score [B,Q,1]. `weighted_sum` [B,Q,D] is the sum of weighted
    values, `total` [B,Q,1] the sum of weights.
    """

    weighted_sum: Tensor
    total: Tensor
    highest: Tensor

    @classmethod
    def to_values(cls, scores: Tensor, mask: Tensor | None, values: Tensor, compiled: bool = False) -> PartialAttention:
        """Return the attention by scores [B,Q,K], which may be overwritten, and a mask [R,1,K] to values [B,K,D]."""
        if mask is not None and scores.device.type == "cpu":
            scores.view(len(mask), -1, scores.shape[-1]).add_(mask)
            mask = None
        weigh = softmax_weights.compiled if compiled else softmax_weights
        weights, total, highest = weigh(scores, mask, values.dtype)
        return cls(torch.bmm(weights, values), total, highest)


@partial(Fused, min_elements=MIN_ELEMENTS)
def softmax_weights(scores: Tensor, mask: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights of scores [B,Q,K] in a dtype, their sums, and the highest scores, both [B,Q,1] f32.

    A mask [R,1,K] is added to the scores of B/R heads each.
    """
    if mask is not None:
        scores = (scores.view(len(mask), -1, scores.shape[-1]) + mask).view(scores.shape)
    highest = scores.amax(-1, keepdim=True).float()
    weights = torch.sub(scores, highest).exp_()
    return weights.to(dtype), weights.sum(-1, keepdim=True), highest


@partial(Fused, min_elements=MIN_ELEMENTS)
def join(query_indices: Tensor, own: PartialAttention, prompts: PartialAttention) -> Tensor:
    """Return the attention [B,Q,D] to a row's own keys, and to those of prompts.

    Args:
        query_indices: [B*Q] i64, the index of each query in the P*S ones of prompts.
        own: The attention of B*Q queries.
        prompts: The attention of P*S queries.
    """
    weighted_sum, total, highest = own
    size = highest.shape[:2]
    # not view(*size, -1): where sizes are unknown, torch.compile does not see that -1 is 1, and reads wrong peaks
    sums, totals, peaks = (x.flatten(0, 1).index_select(0, query_indices).view(*size, x.shape[-1]) for x in prompts)
    peak = torch.maximum(highest, peaks)
    scale, prompt_scale = (highest - peak).exp_(), (peaks - peak).exp_()
    total = (total * scale).addcmul_(totals, prompt_scale)
    output = (weighted_sum * scale).addcmul_(sums, prompt_scale).div_(total)
    return output.to(weighted_sum.dtype)


def _scores(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the products [B,Q,K] of queries [B,Q,D] and keys [B,K,D], in float32 if these have 16 bits.

    Biases of keys may exceed 100, and scores 1,000: bfloat16 would round them by up to 4.
    """
    keys = keys.transpose(1, 2)
    if queries.dtype not in {torch.bfloat16, torch.float16}:
        return torch.bmm(queries, keys)
    if queries.is_cuda:
        return torch.bmm(queries, keys, out_dtype=torch.float32)
    return torch.bmm(queries.float(), keys.float())


class RowAttention:
    """Attention of rows to the prompts that they share, and to their own keys and values.

    Args:
        row_prompts: The index of each row's prompt.
        lengths: The number of tokens of each prompt.
        config: The model's configuration, with its numbers of heads.
        dtype: The dtype of masks.
        device: The model's device.
    """

    def __init__(
        self,
        row_prompts: Sequence[int],
        lengths: Sequence[int],
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._compiled = compiles(config, len(row_prompts), device)
        kv_heads = config.num_key_value_heads
        queries = config.num_attention_heads // kv_heads
        members: list[list[int]] = [[] for _ in lengths]
        prompt_slots = []
        for row, prompt in enumerate(row_prompts):
            prompt_slots.append((prompt, len(members[prompt])))
            members[prompt].append(row)
        max_rows = max(map(len, members), default=0)
        padded = [rows + [0] * (max_rows - len(rows)) for rows in members]
        rows_by_prompt = torch.tensor(padded, dtype=torch.long, device=device)
        heads = torch.arange(kv_heads * queries, device=device).view(kv_heads, 1, queries)
        self.slots = (rows_by_prompt.view(len(members), 1, max_rows, 1) * kv_heads * queries + heads).flatten()
        """For each prompt and key head, the queries of its rows."""
        prompts, slots = torch.tensor(prompt_slots, dtype=torch.long, device=device).view(-1, 2).T[..., None, None]
        group = torch.arange(kv_heads, device=device)[:, None]
        self.query_indices = (
            ((prompts * kv_heads + group) * max_rows + slots) * queries + torch.arange(queries, device=device)
        ).flatten()
        """For each row and head, the index of its query among `slots`."""
        width = max(lengths, default=0)
        self._prompt_mask: Tensor | None = None
        if min(lengths, default=0) != width:
            visible = torch.arange(width, device=device) < torch.tensor(lengths, device=device)[:, None]
            self._prompt_mask = additive_mask(visible, dtype)[:, None]

    def __call__(self, queries: Tensor, prompts: Tensor, own: Tensor, mask: Tensor | None) -> Tensor:
        """Return the attention of queries [R,heads,D] to their prompts [2,P,H,W,D], and to rows' own [2,R,H,C,D].

        The two parts are joined by their sums, so that no tensor holds the scores of both.
        """
        rows, heads, size = queries.shape
        keys, values = own.flatten(1, 2)
        by_head = (len(keys), -1, size)
        prompt_part = self._to_prompts(queries, prompts)
        own_part = PartialAttention.to_values(_scores(queries.reshape(by_head), keys), mask, values, self._compiled)
        attended = (join.compiled if self._compiled else join)(self.query_indices, own_part, prompt_part)
        return attended.view(rows, heads, size).to(queries.dtype)

    def _to_prompts(self, queries: Tensor, prompts: Tensor) -> PartialAttention:
        """Return the attention of queries [R,heads,D] to their prompts, in the order of `slots`."""
        size = queries.shape[-1]
        keys, values = prompts.flatten(1, 2)
        by_prompt = queries.reshape(-1, size).index_select(0, self.slots).view(len(keys), -1, size)
        return PartialAttention.to_values(_scores(by_prompt, keys), self._prompt_mask, values, self._compiled)


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to add to scores: 0 where a key is visible, -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)

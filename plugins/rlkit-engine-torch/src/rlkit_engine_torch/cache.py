"""What a model's layers read of earlier tokens while decoding: keys and values, states, and masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from rlkit.models.attention import layer_types
from rlkit.models.recurrent import StateLayer
from rlkit_engine_torch.prefixes import Prefix

if TYPE_CHECKING:
    from rlkit.interfaces.model import ModelConfig
    from rlkit_engine_torch.decoder import Decoder

ATTENTION = {"full_attention", "sliding_attention"}
"""The types of layers that have keys and values alone."""

WITH_KEYS = {*ATTENTION, "hybrid"}
"""The types of layers that have keys and values."""


class CacheLayer(StateLayer, CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values [R,H,C,D], if it has any, and its states; all rows end at the same column."""

    is_sliding = False

    def __init__(self, decoder: Decoder | None, window: int | None = None, states: int = 1) -> None:
        StateLayer.__init__(self, states)
        CacheLayerMixin.__init__(self)
        self.decoder = decoder
        self.window = window
        self.prefix: Tensor | None = None
        """Keys and values [2,R,H,K,D] in the columns before a prefill's."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        key_states = key_states.to(value_states.dtype)  # under autocast, rotations return them in float32
        is_single, window = key_states.shape[2] == 1, self.window
        if self.decoder is None:  # prefill
            if self.prefix is not None:
                key_states, value_states = (
                    torch.cat((before[..., : new.shape[-1]], new), 2)
                    for before, new in zip(self.prefix, (key_states, value_states), strict=True)
                )
            self.keys, self.values = key_states, value_states
        else:
            rows, start, end = self.decoder.rows, self.decoder.first, self.decoder.end
            self.keys[:rows, :, end - 1 : end] = key_states
            self.values[:rows, :, end - 1 : end] = value_states
            key_states, value_states = self.keys[:rows, :, start:end], self.values[:rows, :, start:end]
        if is_single and window is not None:
            return key_states[:, :, -window:], value_states[:, :, -window:]
        return key_states, value_states

    def get_seq_length(self) -> int:
        if self.decoder is not None:
            return self.decoder.end
        return 0 if self.prefix is None else self.prefix.shape[3]

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:  # the name in transformers up to 5.12
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


def layer_windows(config: ModelConfig) -> list[int | None]:
    """Return the sliding window of each layer, None for a layer that attends to all tokens."""
    window = getattr(config, "sliding_window", None)
    return [window if kind == "sliding_attention" else None for kind in layer_types(config)]


def prefix_columns(prefixes: Sequence[Prefix], begins: Sequence[int], count: int) -> Sequence[Tensor]:
    """Return `count` columns [2,R,H,C,D] of keys and values for each layer: the prefixes, where their rows begin."""
    if not prefixes:
        return []
    like = prefixes[0].chunks[0]
    layers, two, heads, _, size = like.shape
    columns = like.new_zeros(layers, two, len(prefixes), heads, count, size)
    for i, (begin, prefix) in enumerate(zip(begins, prefixes, strict=True)):
        prefix.write(columns[:, :, i, :, begin:])
    return list(columns)


def attention_masks(config: ModelConfig, visible: Tensor) -> Tensor | dict[str, Tensor | None] | None:
    """Return the masks that a model's layers read, by type of layer, from the columns [B,Q,K] that a token sees."""
    kinds = set(layer_types(config))
    masks = {"full_attention": visible}
    window = getattr(config, "sliding_window", None)
    if window is not None:
        queries, keys = visible.shape[-2:]
        columns = torch.arange(keys, device=visible.device)
        windowed = visible & (columns[keys - queries :, None] - columns < window)
        masks["sliding_attention"] = windowed[..., -window:] if queries == 1 else windowed
    ready = {kind: _as_read(config, mask[:, None]) for kind, mask in masks.items()}
    if kinds <= {"linear_attention", "conv"}:
        return None
    if getattr(config, "layer_types", None) is not None:
        return {"linear_attention": None, "conv": None, **ready}
    return ready["full_attention" if window is None else "sliding_attention"]


def _as_read(config: ModelConfig, mask: Tensor) -> Tensor:
    if config._attn_implementation == "sdpa":
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.float32).min)

"""Packed attention in transformers' registry: windows, sinks, soft caps, and heads whose keys and values differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlkit.distributed.sequence import SequenceGroup, causal_attention
from rlkit.ops.attention import Layout, Scoring, packed_attention
from rlkit.ops.ragged import masked_softmax, ragged_attention

if TYPE_CHECKING:
    from rlkit.interfaces.model import ModelConfig
    from rlkit.models.vision import Backbone

PACKED = "rlkit_packed"
"""The name of the packed attention in the registry of transformers; without a layout it attends to padded rows."""

LAYERS = {"full_attention", "sliding_attention", "linear_attention", "conv", "hybrid", "moe", "mlp"}
"""The types of layers that a short probe covers; others attend to all tokens of short rows alone."""


def packing_problem(backbone: Backbone) -> str | None:
    """Explain why a configuration rules out packed attention; None if only a probe can tell.

    Args:
        backbone: A Hugging Face decoder.
    """
    config = backbone.config.get_text_config()
    implementation = config._attn_implementation
    if implementation not in {"sdpa" if backbone._supports_sdpa else "eager", PACKED}:
        return f"its attention is {implementation}, and only sdpa can be packed"
    if getattr(config, "attention_dropout", 0):
        return f"its attention_dropout is {config.attention_dropout:g}, expected 0"
    unknown = sorted(set(layer_types(config)) - LAYERS)
    return f"it has layers of type {', '.join(unknown)}" if unknown else None


def layer_types(config: ModelConfig) -> list[str]:
    """Return the type of each layer of a text model, which older configurations leave to their other values."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        return list(types)
    if getattr(config, "attention_chunk_size", None) is not None:
        return ["chunked_attention"] * config.num_hidden_layers
    windowed = getattr(config, "sliding_window", None) is not None
    return ["sliding_attention" if windowed else "full_attention"] * config.num_hidden_layers


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *mask: Tensor | None, **options: Any) -> Any:
    """Attend to the tokens that a `layout` lets each token see, or without one to those in a mask.

    Args:
        module: A layer of a model.
        query: [B,heads,T,D].
        key: [B,H,K,D].
        value: [B,H,K,V].
        mask: As `sdpa_mask` makes it, for passes over padded rows.
        options: Of the layer: `scaling`, `sliding_window`, `s_aux` (sinks), `softcap`.

    Returns:
        [B,T,heads,V], and None for the weights.
    """
    layout: Layout | None = options.pop("layout", None)
    sequence: SequenceGroup | None = options.pop("sequence", None)
    heads, key_heads = query.shape[1], key.shape[1]
    window, sinks, softcap = (options.get(name) for name in ("sliding_window", "s_aux", "softcap"))
    scoring = Scoring(options.get("scaling") or query.shape[-1] ** -0.5, window, sinks, softcap)
    if sequence is not None:  # agreed: the ranks of a group make the same passes
        query, key, value = sequence.gather_tokens(query, key, value)
    if layout is not None:  # agreed: the ranks of a group make the same passes
        layout.windows.append(window)
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # the gradient of `x[0]` copies it
        function = packed_attention if query.device.type == "cpu" and softcap is None else ragged_attention
        output = function(q, k, v, scoring, layout)[None]
    elif sequence is not None:
        output = causal_attention(query, key, value, options.get("scaling"), options.get("dropout", 0.0))
    elif sinks is not None or softcap is not None:
        [visible] = mask or (None,)
        output = masked_softmax(query, key, value, scoring, visible).transpose(1, 2)
    else:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, *mask, **options)
    # agreed: the ranks of a group make the same passes
    return output if sequence is None else sequence.gather_heads(output, heads, key_heads), None


ALL_ATTENTION_FUNCTIONS.register(PACKED, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED, sdpa_mask)

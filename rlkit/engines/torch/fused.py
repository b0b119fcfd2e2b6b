"""Decoding through fused copies of a model's weights: Llama, Mistral, Qwen2 and Qwen3 blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers.cache_utils import Cache

from rlkit.engines.torch.decoder import Decoder
from rlkit.models.lora import base_model, delta

KINDS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Classes whose blocks are RMSNorm, rotary attention, RMSNorm and a gated SiLU."""


@dataclass(frozen=True)
class _Matrix:
    """A linear layer, or several of one input: weight [O,I] and bias [O]."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def add_to(self, total: Tensor, x: Tensor) -> Tensor:
        """Return `total + self(x)`."""
        return torch.addmm(total if self.bias is None else total + self.bias, x, self.weight.T)


@dataclass(frozen=True)
class _Block:
    """A block's weights; the scales of its norms are part of the matrices that follow them.

    `inputs` yields queries, keys and values of all heads. In a query or a key, channels that are rotated together are
    neighbours, so that a rotation is one complex product. `head_norms` [heads,D] scale queries and keys in Qwen3.
    """

    inputs: _Matrix
    head_norms: Tensor | None
    outputs: _Matrix
    gate_up: _Matrix
    down: _Matrix


class FusedDecoder(Decoder):
    """A `Decoder` that computes what the model's modules do, in fewer passes, from copies of their weights.

    The copies are made at the first pass after `refresh` or `release`, adapters merged, in autocast's type if there is
    one.
    """

    def refresh(self) -> None:
        """Drop the copies, since the weights have changed."""
        self._blocks: list[_Block] = []

    def release(self) -> None:
        super().release()
        self.refresh()

    def _forward(self, tokens: Tensor, visible: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        model, kind = base_model(self.model), self._kind()
        if not self._blocks:
            self._blocks = [_fuse(layer, kind) for layer in model.model.layers]
        hidden = model.model.embed_tokens(tokens).to(kind)
        rows, count, width = hidden.shape
        cos, sin = (x[..., : x.shape[-1] // 2].float() for x in model.model.rotary_emb(hidden.float(), positions))
        rotation = torch.complex(cos, sin).view(rows * count, 1, -1)
        mask = torch.zeros_like(visible, dtype=kind).masked_fill_(~visible, -torch.inf)
        hidden = hidden.view(rows * count, width)
        for block, layer in zip(self._blocks, cache.layers, strict=True):
            mixed = self._attention(block, layer, self._normalized(hidden), rotation, mask)
            hidden = block.outputs.add_to(hidden, mixed)
            gate, up = block.gate_up(self._normalized(hidden)).chunk(2, dim=-1)
            hidden = block.down.add_to(hidden, silu(gate).mul_(up))
        last = self._normalized(hidden.view(rows, count, width)[:, -1]) * model.model.norm.weight.to(kind)
        head = model.get_output_embeddings()
        return linear(last, head.weight.to(kind), None if head.bias is None else head.bias.to(kind))

    def _attention(self, block: _Block, layer: Any, x: Tensor, rotation: Tensor, mask: Tensor) -> Tensor:
        """Add the keys and values of tokens [N,H] to the cache and return what they attend to [N,heads*D]."""
        config, (rows, count, _) = self.config, mask.shape
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        size = block.inputs.weight.shape[0] // (heads + 2 * kv_heads)
        turned, values = block.inputs(x).view(-1, heads + 2 * kv_heads, size).split([heads + kv_heads, kv_heads], 1)
        if block.head_norms is not None:
            turned = self._normalized(turned) * block.head_norms
        pairs = torch.view_as_complex(turned.float().unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * rotation).flatten(-2).to(values.dtype)
        shape = (rows, count, -1, size)
        queries, keys = (part.reshape(shape).transpose(1, 2) for part in turned.split([heads, kv_heads], 1))
        keys, values = layer.update(keys, values.reshape(shape).transpose(1, 2))
        # queries that share a key are queries of one head, so that no key is repeated
        groups = heads // kv_heads
        queries = queries.reshape(rows, kv_heads, groups * count, size)
        shared = mask[:, None] if count == 1 else mask.repeat(1, groups, 1)[:, None]
        found = scaled_dot_product_attention(queries, keys, values, attn_mask=shared)
        return found.view(rows, heads, count, size).transpose(1, 2).reshape(rows * count, heads * size)

    def _normalized(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return (wide * scale).to(x.dtype)

    def _kind(self) -> torch.dtype:
        with self.autocast():
            if torch.is_autocast_enabled(self.device.type):
                return torch.get_autocast_dtype(self.device.type)
        return next(self.model.parameters()).dtype


def fusible(model: Any) -> bool:
    """Whether a model's blocks are of a kind that `FusedDecoder` computes; `why_not` checks that it does."""
    inner, config = base_model(model), model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = getattr(config, "sliding_window", None) is not None and not getattr(config, "layer_types", None)
    return (
        type(inner).__name__ in KINDS and config.hidden_act == "silu" and kinds == {"full_attention"} and not windowed
    )


def _fuse(layer: Any, kind: torch.dtype) -> _Block:
    attention, mlp = layer.self_attn, layer.mlp
    size = attention.head_dim
    queries, keys = (
        _interleaved(_matrix([p], layer.input_layernorm, kind), size) for p in (attention.q_proj, attention.k_proj)
    )
    values = _matrix([attention.v_proj], layer.input_layernorm, kind)
    norms = None
    if hasattr(attention, "q_norm"):
        norm = _Matrix(torch.stack([attention.q_norm.weight, attention.k_norm.weight]), None)
        order = _order(size, norm.weight.device)
        heads = [queries.weight.shape[0] // size, keys.weight.shape[0] // size]
        norms = norm.weight[:, order].repeat_interleave(torch.tensor(heads, device=order.device), 0).to(kind)
    return _Block(
        _joined([queries, keys, values]),
        norms,
        _matrix([attention.o_proj], None, kind),
        _matrix([mlp.gate_proj, mlp.up_proj], layer.post_attention_layernorm, kind),
        _matrix([mlp.down_proj], None, kind),
    )


def _matrix(projections: list[nn.Module], norm: Any, kind: torch.dtype) -> _Matrix:
    """Return the layers of one input as one, adapters merged, the norm's scale before them included."""
    found = []
    for projection in projections:
        adapted = hasattr(projection, "get_delta_weight")
        base: Any = projection.get_base_layer() if adapted else projection
        weight = base.weight.float() + delta(projection) if adapted else base.weight
        found.append(_Matrix(weight if norm is None else weight * norm.weight, base.bias))
    joined = _joined(found)
    return _Matrix(joined.weight.to(kind), None if joined.bias is None else joined.bias.to(kind))


def _joined(matrices: list[_Matrix]) -> _Matrix:
    weight = torch.cat([m.weight for m in matrices])
    if all(m.bias is None for m in matrices):
        return _Matrix(weight, None)
    return _Matrix(
        weight, torch.cat([m.weight.new_zeros(len(m.weight)) if m.bias is None else m.bias for m in matrices])
    )


def _interleaved(matrix: _Matrix, size: int) -> _Matrix:
    """Reorder the channels of each head of `size`: those that rotate together, i and i + size/2, become neighbours."""
    order = _order(size, matrix.weight.device)
    weight = matrix.weight.unflatten(0, (-1, size))[:, order].flatten(0, 1)
    return _Matrix(weight, None if matrix.bias is None else matrix.bias.unflatten(0, (-1, size))[:, order].flatten())


def _order(size: int, device: torch.device) -> Tensor:
    return torch.arange(size, device=device).view(2, -1).T.flatten()

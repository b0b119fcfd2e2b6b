"""Fused copies of the weights of Llama, Mistral, Qwen2 and Qwen3 models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from rlkit.models.lora import merged_weight
from rlkit_engine_torch.compiled import compiles, rotated_heads
from rlkit_engine_torch.layers import inverse_rms, swiglu

Attend = Callable[[int, Tensor, Tensor], Tensor]
"""Attention: from a block's index, queries [N,Q,D], and keys and values [N,2,K,D], to outputs [N,Q,D]."""

MODEL_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Classes whose blocks are RMSNorm, rotary attention, RMSNorm and a gated SiLU."""

PACKED_SIZE = 1 << 17
"""The smallest weight that is packed: a call takes 25 us longer than a plain one, measured on an AMD EPYC."""

PACKED_ROWS = 128
"""The number of rows that packed weights are optimized for; other numbers work too."""


@dataclass(frozen=True)
class FusedLinear:
    """A linear layer, or several with the same input: weight [O,I] and bias [O]."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output [N,O] of tokens [N,I]."""
        return linear(x, self.weight, self.bias)

    def plus(self, x: Tensor, addend: Tensor) -> Tensor:
        """Return `self(x) + addend`, which may be overwritten."""
        return (addend if self.bias is None else addend + self.bias).addmm_(x, self.weight.T)

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """Return `self(x) * factor`."""
        return self(x).mul_(factor)

    def silu(self, x: Tensor) -> Tensor:
        """Return `silu(self(x))`."""
        return silu(self(x), inplace=True)

    def scaled(self, factor: float) -> FusedLinear:
        """Return a layer whose outputs are multiplied by a factor."""
        return FusedLinear(self.weight * factor, None if self.bias is None else self.bias * factor)

    def interleaved(self, size: int) -> FusedLinear:
        """Return a layer with the outputs of each head of `size` in the order of `rotation_order`."""
        channels = rotation_order(size, self.weight.device)
        weight = self.weight.view(-1, size, self.weight.shape[1])[:, channels].flatten(0, 1)
        return FusedLinear(weight, None if self.bias is None else self.bias.view(-1, size)[:, channels].flatten())

    def to(self, dtype: torch.dtype) -> FusedLinear:
        """Return a layer of a dtype, packed if `should_pack`."""
        weight = self.weight.to(dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        if not should_pack(weight):
            return FusedLinear(weight, bias)
        return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_ROWS), bias)


class PackedLinear(FusedLinear):
    """A linear layer in the layout of oneDNN's kernels for few rows.

    With AVX512 it is 1.3 to 1.8 times as fast as a plain one. oneDNN compiles a kernel for each number of rows, and
    keeps 1,024 of them.
    """

    def __call__(self, x: Tensor) -> Tensor:
        return self._unary(x, "none")

    def plus(self, x: Tensor, addend: Tensor) -> Tensor:
        return self._binary(x, addend, "add")

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        return self._binary(x, factor, "mul")

    def silu(self, x: Tensor) -> Tensor:
        return self._unary(x, "swish")

    def _unary(self, x: Tensor, operator: str) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, operator, [], "")
        return output

    def _binary(self, x: Tensor, operand: Tensor, operator: str) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, operand, self.weight, self.bias, operator)
        return output


@dataclass(frozen=True)
class Block:
    """A block's weights; the scales of its norms are part of the layers that follow them.

    `inputs` computes the queries, keys and values of all heads. In queries and keys, channels that are rotated together
    are neighbours, so that a rotation is one complex product. Queries are divided by the square root of `size`.
    `head_norms` [rotated,D] scale queries and keys in Qwen3; the first `rotated` heads are queries and keys. Without
    `up`, `gate` computes both inputs of the activation.
    """

    size: int
    rotated: int
    inputs: FusedLinear
    head_norms: Tensor | None
    outputs: FusedLinear
    gate: FusedLinear
    up: FusedLinear | None
    down: FusedLinear

    def activated(self, x: Tensor, compiled: bool) -> Tensor:
        """Return the gated activations [N,I] of normalized tokens [N,H]."""
        if self.up is not None:
            return self.up.times(x, self.gate.silu(x))
        return (swiglu.compiled if compiled else swiglu)(*self.gate(x).chunk(2, -1))


class FusedModel:
    """A model's fused weights, its adapters merged, and the pass through them.

    Args:
        model: A causal language model for which `why_not_fused` returns None.
        dtype: The dtype of the copies.
    """

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self._model = model
        self._dtype = dtype
        self._config = model.config.get_text_config()
        self._eps: float = self._config.rms_norm_eps
        self._blocks = [fuse(layer, dtype) for layer in model.model.layers]
        self._head = fuse_head(model.get_output_embeddings(), model.model.norm, dtype)
        self._rotations: Tensor | None = None

    def __call__(self, tokens: Tensor, positions: Tensor, longest: int, attend: Attend) -> Tensor:
        """Return the last block's outputs [N,H] for tokens [N].

        Args:
            tokens: [N] i64.
            positions: [N] i64, below `longest`.
            longest: The number of positions that need rotations.
            attend: Attention.
        """
        hidden: Tensor = self._model.model.embed_tokens(tokens).to(self._dtype)
        rotation = self._rotation(longest).index_select(0, positions)[:, None]
        compiled = compiles(self._config, len(tokens), hidden.device)
        for i, block in enumerate(self._blocks):
            attended = attend(i, *self._project(block, self._normalized(hidden), rotation, compiled))
            hidden = block.outputs.plus(attended.reshape(len(hidden), -1), hidden)
            hidden = block.down.plus(block.activated(self._normalized(hidden), compiled), hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [N,V] of outputs [N,H]."""
        return self._head(self._normalized(hidden))

    def _project(self, block: Block, x: Tensor, rotation: Tensor, compiled: bool) -> tuple[Tensor, Tensor]:
        """Return queries [N,Q,D], and keys and values [N,2,K,D], of normalized tokens [N,H]."""
        heads, queries = block.inputs(x).view(len(x), -1, block.size), self._config.num_attention_heads
        if compiled:
            counts = queries, block.rotated - queries
            return rotated_heads.compiled(heads, torch.view_as_real(rotation), block.head_norms, counts, self._eps)
        queries_keys = heads[:, : block.rotated]
        scaled = queries_keys if block.head_norms is None else self._normalized(queries_keys) * block.head_norms
        rotated = scaled.float()
        torch.view_as_complex(rotated.view(*rotated.shape[:2], -1, 2)).mul_(rotation)
        if rotated is not queries_keys:
            queries_keys.copy_(rotated)
        return heads[:, :queries], heads[:, queries:].view(len(x), 2, -1, block.size)

    def _rotation(self, count: int) -> Tensor:
        """Return the rotations [M,D/2] of at least the first `count` positions."""
        if self._rotations is None or len(self._rotations) < count:
            like = self._model.model.norm.weight.new_empty(0, dtype=torch.float32)
            positions = torch.arange(max(256, 2 * count), device=like.device)[None]
            cos, sin = (x[0, :, : x.shape[-1] // 2] for x in self._model.model.rotary_emb(like, positions))
            self._rotations = torch.complex(cos, sin)
        return self._rotations

    def _normalized(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and x.dtype == torch.float32:  # here rms_norm is five operators, one of them slow
            return x * inverse_rms(x, self._eps)
        return rms_norm(x, x.shape[-1:], None, self._eps)


def should_pack(weight: Tensor) -> bool:
    """Whether a weight is large enough to be packed, and products of its dtype are oneDNN's."""
    return weight.device.type == "cpu" and weight.numel() >= PACKED_SIZE and uses_onednn(weight.dtype)


@cache
def uses_onednn(dtype: torch.dtype) -> bool:
    """Check whether products of a dtype are oneDNN's on this CPU: where there are any, and MKL's are not faster.

    In float32 oneDNN is 1.2 times as fast as MKL on AMD with AVX512. Without AVX512, MKL is as fast in decoding, and it
    keeps no compiled kernels. The choice depends on the CPU alone: runs repeat and resume bit for bit.
    """
    if not all(hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    has_mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    has_avx512 = bool(torch.cpu.get_capabilities().get("avx512_f"))
    return dtype == torch.float32 and (has_avx512 or not has_mkl)


def why_not_fused(model: Any) -> str | None:
    """Return the reason why `fuse` does not support a model's blocks; None if it does."""
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) if layer_types is None else None
    if type(model).__name__ not in MODEL_CLASSES:
        return f"its class is none of {', '.join(MODEL_CLASSES)}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, expected silu"
    if window is not None or not set(layer_types or ()) <= {"full_attention"}:
        return "it attends in a sliding window"
    rotation = getattr(model.model.rotary_emb, "rope_type", "default")
    return f"its rotations are {rotation}, expected fixed ones" if rotation in {"dynamic", "longrope"} else None


@torch.no_grad()
def fuse(layer: Any, dtype: torch.dtype) -> Block:
    """Return copies of a block's weights in a dtype."""
    attention, mlp = layer.self_attn, layer.mlp
    size = attention.head_dim
    query_scale = float(size**-0.5)
    queries, keys, values = (
        _scaled(p, layer.input_layernorm) for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    head_norms = None
    if hasattr(attention, "q_norm"):
        heads = [layer.weight.shape[0] // size for layer in (queries, keys)]
        norms = (attention.q_norm.weight * query_scale, attention.k_norm.weight)
        channels = rotation_order(size, norms[0].device)
        head_norms = torch.cat([n[channels].expand(h, -1) for n, h in zip(norms, heads, strict=True)])
    else:
        queries = queries.scaled(query_scale)
    gate, up = (_scaled(p, layer.post_attention_layernorm) for p in (mlp.gate_proj, mlp.up_proj))
    joins = joins_gates(gate.weight.device)
    return Block(
        size,
        (queries.weight.shape[0] + keys.weight.shape[0]) // size,
        _joined([queries.interleaved(size), keys.interleaved(size), values]).to(dtype),
        None if head_norms is None else head_norms.to(dtype),
        _merged(attention.o_proj).to(dtype),
        (_joined([gate, up]) if joins else gate).to(dtype),
        None if joins else up.to(dtype),
        _merged(mlp.down_proj).to(dtype),
    )


@torch.no_grad()
def fuse_head(head: Any, norm: Any, dtype: torch.dtype) -> FusedLinear:
    """Return a copy of the output layer that includes the scale of the norm before it."""
    return _scaled(head, norm).to(dtype)


def joins_gates(device: torch.device) -> bool:
    """Whether gates and what they multiply are one product: not on CPUs, where oneDNN's products include the two."""
    return device.type != "cpu"


def rotation_order(size: int, device: torch.device) -> Tensor:
    """Return the channels [size] 0, size/2, 1, size/2 + 1 …: pairs of channels that are rotated together."""
    return torch.arange(size, device=device).view(2, -1).T.flatten()


def _merged(projection: Any) -> FusedLinear:
    """Return a layer with its adapters merged."""
    if not hasattr(projection, "get_delta_weight"):
        return FusedLinear(projection.weight, projection.bias)
    base = projection.get_base_layer()
    return FusedLinear(merged_weight(projection, base.weight), base.bias)


def _scaled(projection: Any, norm: Any) -> FusedLinear:
    """Return a layer that includes the scale of the norm before it."""
    merged = _merged(projection)
    return FusedLinear(merged.weight * norm.weight, merged.bias)


def _joined(layers: list[FusedLinear]) -> FusedLinear:
    """Return layers of one input as one layer."""
    weight = torch.cat([layer.weight for layer in layers])
    if all(layer.bias is None for layer in layers):
        return FusedLinear(weight, None)
    biases = [layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias for layer in layers]
    return FusedLinear(weight, torch.cat(biases))

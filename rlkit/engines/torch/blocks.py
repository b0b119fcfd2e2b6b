"""Fused copies of the weights of Llama, Mistral, Qwen2 and Qwen3 blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from rlkit.models.lora import delta

KINDS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Classes whose blocks are RMSNorm, rotary attention, RMSNorm and a gated SiLU."""


PACKED_SIZE = 1 << 17
"""The smallest weight that is packed: a call costs 25 us more than a plain one, measured on an AMD EPYC."""
PACKED_ROWS = 128
"""The number of rows that packed weights are ordered for; other numbers work as well."""


@dataclass(frozen=True)
class Matrix:
    """A linear layer, or several of one input: weight [O,I] and bias [O]."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output [N,O] of tokens [N,I]."""
        return linear(x, self.weight, self.bias)

    def plus(self, x: Tensor, total: Tensor) -> Tensor:
        """Return `self(x) + total`."""
        return torch.addmm(total if self.bias is None else total + self.bias, x, self.weight.T)

    def times(self, x: Tensor, by: Tensor) -> Tensor:
        """Return `self(x) * by`."""
        return self(x).mul_(by)

    def silu(self, x: Tensor) -> Tensor:
        """Return `silu(self(x))`."""
        return silu(self(x), inplace=True)

    def scaled(self, by: Tensor | float) -> Matrix:
        """Return a layer whose outputs are multiplied by a number, or each by its own [O]."""
        column = by if isinstance(by, float) else by[:, None]
        return Matrix(self.weight * column, None if self.bias is None else self.bias * by)

    def interleaved(self, size: int) -> Matrix:
        """Reorder the outputs of each head of `size` as `order` does."""
        places = order(size).to(self.weight.device)
        weight = self.weight.view(-1, size, self.weight.shape[1])[:, places].flatten(0, 1)
        return Matrix(weight, None if self.bias is None else self.bias.view(-1, size)[:, places].flatten())

    def to(self, kind: torch.dtype) -> Matrix:
        """Return a layer of a type, packed if `packs`."""
        weight, bias = self.weight.to(kind), None if self.bias is None else self.bias.to(kind)
        if not packs(weight):
            return Matrix(weight, bias)
        return Packed(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_ROWS), bias)


class Packed(Matrix):
    """A linear layer in the order of oneDNN's kernels for few rows: on a CPU 1.3 to 1.8 times as fast as plain ones.

    Kernels are compiled for each number of rows; oneDNN keeps 1,024 of them.
    """

    def __call__(self, x: Tensor) -> Tensor:
        return self._alone(x, "none")

    def plus(self, x: Tensor, total: Tensor) -> Tensor:
        return self._with(x, total, "add")

    def times(self, x: Tensor, by: Tensor) -> Tensor:
        return self._with(x, by, "mul")

    def silu(self, x: Tensor) -> Tensor:
        return self._alone(x, "swish")

    def _alone(self, x: Tensor, then: str) -> Tensor:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, then, [], "")
        return found

    def _with(self, x: Tensor, other: Tensor, then: str) -> Tensor:
        found: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, then)
        return found


@dataclass(frozen=True)
class Block:
    """A block's weights; the scales of its norms are part of the matrices that follow them.

    `inputs` yields the queries, keys and values of all heads. In a query or a key, channels that are rotated together
    are neighbours, so that a rotation is one complex product; queries are divided by the root of their `size`.
    `head_norms` [heads,D] scale queries and keys in Qwen3.
    """

    size: int
    inputs: Matrix
    head_norms: Tensor | None
    outputs: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix


def packs(weight: Tensor) -> bool:
    """Whether to pack a weight: if it is large, and this build of PyTorch has the operators that it compiles to."""
    here = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= PACKED_SIZE
    return here and all(hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight"))


def fusible(model: Any) -> bool:
    """Whether a model's blocks are of a kind that `fuse` takes."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) if kinds is None else None
    full = window is None and set(kinds or ()) <= {"full_attention"}
    return type(model).__name__ in KINDS and config.hidden_act == "silu" and full


@torch.no_grad()
def fuse(layer: Any, kind: torch.dtype) -> Block:
    """Copy a block's weights, in a type."""
    attention, mlp = layer.self_attn, layer.mlp
    size, shrink = attention.head_dim, float(attention.head_dim**-0.5)
    queries, keys, values = (
        _scaled(p, layer.input_layernorm) for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    head_norms = None
    if hasattr(attention, "q_norm"):
        heads = [m.weight.shape[0] // size for m in (queries, keys)]
        norms = (attention.q_norm.weight * shrink, attention.k_norm.weight)
        head_norms = torch.cat([n[order(size).to(n.device)].expand(h, -1) for n, h in zip(norms, heads, strict=True)])
    else:
        queries = queries.scaled(shrink)
    return Block(
        size,
        _joined([queries.interleaved(size), keys.interleaved(size), values]).to(kind),
        None if head_norms is None else head_norms.to(kind),
        _merged(attention.o_proj).to(kind),
        _scaled(mlp.gate_proj, layer.post_attention_layernorm).to(kind),
        _scaled(mlp.up_proj, layer.post_attention_layernorm).to(kind),
        _merged(mlp.down_proj).to(kind),
    )


@torch.no_grad()
def fuse_head(head: Any, norm: Any, kind: torch.dtype) -> Matrix:
    """Copy the output layer, with the scale of the norm before it."""
    return _scaled(head, norm).to(kind)


def order(size: int) -> Tensor:
    """Return the places [size] of channels 0, size/2, 1, size/2 + 1 …: those that are rotated together."""
    return torch.arange(size).view(2, -1).T.flatten()


def _merged(projection: Any) -> Matrix:
    """Return a layer with its adapters merged."""
    if not hasattr(projection, "get_delta_weight"):
        return Matrix(projection.weight, projection.bias)
    base = projection.get_base_layer()
    return Matrix(base.weight.float() + delta(projection), base.bias)


def _scaled(projection: Any, norm: Any) -> Matrix:
    """Return a layer that includes the scale of the norm before it."""
    matrix = _merged(projection)
    return Matrix(matrix.weight * norm.weight, matrix.bias)


def _joined(matrices: list[Matrix]) -> Matrix:
    weight = torch.cat([m.weight for m in matrices])
    if all(m.bias is None for m in matrices):
        return Matrix(weight, None)
    return Matrix(
        weight, torch.cat([m.weight.new_zeros(len(m.weight)) if m.bias is None else m.bias for m in matrices])
    )

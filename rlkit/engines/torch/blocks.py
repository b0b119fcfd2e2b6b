"""Fused copies of the weights of Llama, Mistral, Qwen2 and Qwen3 models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from rlkit.models.lora import delta
from rlkit.ops.layers import inverse_rms

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
    `head_norms` [turned,D] scale queries and keys in Qwen3, of which there are `turned` heads.
    """

    size: int
    turned: int
    inputs: Matrix
    head_norms: Tensor | None
    outputs: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix


class FusedModel:
    """A model's fused weights, its adapters merged, and the pass through them.

    Args:
        model: A causal language model for which `why_not_fused` returns None.
        kind: The type of the copies.
    """

    def __init__(self, model: Any, kind: torch.dtype) -> None:
        self._model = model
        self._kind = kind
        self._eps: float = model.config.get_text_config().rms_norm_eps
        self._blocks = [fuse(layer, kind) for layer in model.model.layers]
        self._head = fuse_head(model.get_output_embeddings(), model.model.norm, kind)
        self._versions = [weight._version for weight in model.parameters()]
        self._rotations: Tensor | None = None

    def outdated(self) -> bool:
        """Whether the model's own weights were written since."""
        return self._versions != [weight._version for weight in self._model.parameters()]

    def __call__(
        self, tokens: Tensor, positions: Tensor, longest: int, attend: Callable[[int, Tensor], Tensor]
    ) -> Tensor:
        """Return the last block's outputs [N,H] for tokens [N].

        Args:
            tokens: [N] i64.
            positions: [N] i64, below `longest`.
            longest: The number of positions to have rotations for.
            attend: From a block's index and the queries, keys and values [N,heads,D] of all heads to what queries
                attend to [N,heads,D].
        """
        hidden: Tensor = self._model.model.embed_tokens(tokens).to(self._kind)
        rotation = self._rotation(longest).index_select(0, positions)[:, None]
        for i, block in enumerate(self._blocks):
            found = self._project(block, self._normalized(hidden), rotation)
            hidden = block.outputs.plus(attend(i, found).reshape(len(hidden), -1), hidden)
            x = self._normalized(hidden)
            hidden = block.down.plus(block.up.times(x, block.gate.silu(x)), hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [N,V] of outputs [N,H]."""
        return self._head(self._normalized(hidden))

    def _project(self, block: Block, x: Tensor, rotation: Tensor) -> Tensor:
        """Return queries, keys and values [N,heads,D] of normalized tokens [N,H]."""
        found = block.inputs(x).view(len(x), -1, block.size)
        turned = found[:, : block.turned]
        wide = turned if block.head_norms is None else self._normalized(turned) * block.head_norms
        wide = wide.float()
        torch.view_as_complex(wide.view(*wide.shape[:2], -1, 2)).mul_(rotation)
        if wide is not turned:
            turned.copy_(wide)
        return found

    def _rotation(self, count: int) -> Tensor:
        """Return the rotations [M,D/2] of at least the first `count` positions."""
        if self._rotations is None or len(self._rotations) < count:
            like = self._model.model.norm.weight.new_empty(0, dtype=torch.float32)
            every = torch.arange(max(256, 2 * count), device=like.device)[None]
            cos, sin = (x[0, :, : x.shape[-1] // 2] for x in self._model.model.rotary_emb(like, every))
            self._rotations = torch.complex(cos, sin)
        return self._rotations

    def _normalized(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and x.dtype == torch.float32:  # where rms_norm is five operators, one of them slow
            return x * inverse_rms(x, self._eps)
        return rms_norm(x, x.shape[-1:], None, self._eps)


def packs(weight: Tensor) -> bool:
    """Whether to pack a weight: if it is large, and this build of PyTorch has the operators that it compiles to."""
    here = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= PACKED_SIZE
    return here and all(hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight"))


def why_not_fused(model: Any) -> str | None:
    """Return why a model's blocks are of no kind that `fuse` takes."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) if kinds is None else None
    if type(model).__name__ not in KINDS:
        return f"its class is none of {', '.join(KINDS)}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, expected silu"
    if window is not None or not set(kinds or ()) <= {"full_attention"}:
        return "it attends in a sliding window"
    rotation = getattr(model.model.rotary_emb, "rope_type", "default")
    return f"its rotations are {rotation}, expected fixed ones" if rotation in {"dynamic", "longrope"} else None


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
        (queries.weight.shape[0] + keys.weight.shape[0]) // size,
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

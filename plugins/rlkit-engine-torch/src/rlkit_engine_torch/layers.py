"""Norms, activations and rotations in fewer kernels than PyTorch's own on a GPU, where they are compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from rlkit.interfaces.model import LayerFusion
from rlkit.ops.attention import Scoring, autocasted
from rlkit.ops.autograd import Context
from rlkit.ops.fusion import Fused, on_gpu
from rlkit.ops.products import product
from rlkit.ops.ragged import ragged_attention

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""Names of models in transformers whose layers are alike."""


class FusedLayers(LayerFusion):
    """Fuses norms, MLPs and rotations on a GPU, in float32 and bfloat16; on a CPU, the faster library multiplies."""

    def fuse(self, model: nn.Module) -> None:
        forwards: dict[str, Callable[..., Any]] = {"RMSNorm": _rms_norm, "MLP": _mlp, "Attention": _attend}
        kinds = {family + kind: forward for family in FAMILIES for kind, forward in forwards.items()}
        for layer in model.modules():
            if type(layer) is nn.Linear:
                layer.forward = partial(_linear, layer)  # type: ignore[method-assign]
            if type(layer).__name__ in kinds:
                layer.forward = partial(kinds[type(layer).__name__], layer)  # type: ignore[assignment]


def _fuses(layer: nn.Module, x: Tensor) -> bool:
    """Whether a layer and its input have the types and the device of fused passes."""
    from torch.distributed.tensor import DTensor

    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
    dtypes = {torch.float32, torch.bfloat16, torch.uint8}  # bytes are those of weights in 4 bits
    tensors = (x, *layer.parameters())
    return dtype in dtypes and all(t.dtype in dtypes and on_gpu(t) and not isinstance(t, DTensor) for t in tensors)


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    is_plain = type(layer.weight) is nn.Parameter and not torch.is_autocast_enabled(x.device.type)
    return (product if is_plain else linear)(x, layer.weight, layer.bias)


def _attend(layer: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **options: Any) -> Any:
    """Attend as the layer does; in a packed pass on a GPU, queries and keys are rotated at once."""
    x, (cos, sin), layout = hidden_states, position_embeddings, options.get("layout")
    if layout is None or "sequence" in options or cos.shape[-1] != layer.head_dim or not _fuses(layer, x):
        return type(layer).forward(layer, x, position_embeddings, **options)
    projected = (project(x) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
    queries, keys, values = (heads.view(x.shape[1], -1, layer.head_dim) for heads in projected)
    if hasattr(layer, "q_norm"):
        queries, keys = layer.q_norm(queries), layer.k_norm(keys)
    queries, keys = RotationFunction.apply(queries, keys, cos.squeeze(0), sin.squeeze(0))  # type: ignore[no-untyped-call]
    window = getattr(layer, "sliding_window", getattr(layer.config, "sliding_window", None))
    layout.windows.append(window)
    output = ragged_attention(queries, keys, values, Scoring(layer.scaling, window), layout)
    return layer.o_proj(output.reshape(*x.shape[:-1], -1)), None


def _rms_norm(layer: Any, x: Tensor) -> Tensor:
    if not _fuses(layer, x):
        return type(layer).forward(layer, x)  # type: ignore[no-any-return]
    return RMSNormFunction.apply(x.reshape(-1, x.shape[-1]), layer.weight, layer.variance_epsilon).view(x.shape)  # type: ignore[no-any-return, no-untyped-call]


def _mlp(layer: Any, x: Tensor) -> Tensor:
    if layer.config.hidden_act != "silu" or not _fuses(layer, x):
        return type(layer).forward(layer, x)  # type: ignore[no-any-return]
    flat = autocasted(x).reshape(-1, x.shape[-1])
    gated = SwiGLUFunction.apply(layer.gate_proj(flat), layer.up_proj(flat))  # type: ignore[no-untyped-call]
    return layer.down_proj(gated).view(x.shape)  # type: ignore[no-any-return]


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Return `1 / rms(x)` [...,1] of x [...,H]."""
    mean_square: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    return mean_square.add_(eps).rsqrt_()


class RMSNormFunction(torch.autograd.Function):
    """`weight * x / rms(x)` (Zhang and Sennrich 2019, eq. 4) for x [N,H] and weight [H], computed in float32."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        output, scale = rms_norm(x, weight, eps, autocasted(x[:0]).dtype)
        ctx.save_for_backward(x, weight, scale)
        return output

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        return *rms_norm_grads(grad, x, weight, scale, ctx.needs_input_grad[1]), None


@Fused
def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the output [N,H] of `RMSNormFunction` in a dtype, and `1 / rms(x)` [N,1]."""
    scale = inverse_rms(x.float(), eps)
    return (x * scale).mul_(weight).to(dtype), scale


@Fused
def rms_norm_grads(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients by x and weight, None unless it is needed."""
    grad = grad.float()
    normalized = x * scale
    products = grad * normalized
    d_weight = products.sum(0) if needs_weight else None
    radial = (products @ weight.float()).div_(x.shape[-1])[:, None]  # [N,1], the part along x, which has no effect
    return (grad * weight).sub_(normalized.mul_(radial)).mul_(scale).to(x.dtype), d_weight


class SwiGLUFunction(torch.autograd.Function):
    """`silu(gate) * up` (Shazeer 2020, eq. 6) for tensors [N,I]."""

    @staticmethod
    def forward(ctx: Context, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return swiglu(gate, up)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor]:
        return swiglu_grads(grad, *ctx.saved_tensors)


@Fused
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up`."""
    return silu(gate).mul_(up)


@Fused
def swiglu_grads(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients by gate and up."""
    return torch.ops.aten.silu_backward(grad * up, gate), silu(gate).mul_(grad)


class RotationFunction(torch.autograd.Function):
    """Rotary positions (Su et al. 2021, eq. 34) of queries and keys [N,heads,D], computed in float32.

    Cosines and sines [N,D] hold those of D/2 angles twice.
    """

    @staticmethod
    def forward(ctx: Context, queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return rotate(queries, keys, cos, sin, autocasted(cos[:0]).dtype)

    @staticmethod
    def backward(ctx: Context, d_queries: Tensor, d_keys: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *rotate(d_queries, d_keys, cos, -sin, d_queries.dtype), None, None


@Fused
def rotate(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return queries and keys, rotated by the angles of `RotationFunction`, in a dtype."""
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    halves = ((x, torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)) for x in (queries, keys))
    rotated_queries, rotated_keys = ((x * cos + turned * sin).to(dtype) for x, turned in halves)
    return rotated_queries, rotated_keys

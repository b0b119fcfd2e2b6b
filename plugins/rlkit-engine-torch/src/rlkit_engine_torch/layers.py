"""Norms, activations and rotations in fewer kernels than PyTorch's own on a GPU, where they are compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from rlkit.interfaces.model import LayerFusion
from rlkit.ops import fusion
from rlkit.ops.attention import Scoring, autocasted
from rlkit.ops.autograd import Context
from rlkit.ops.fusion import Fused, on_gpu
from rlkit.ops.products import float32_product, product
from rlkit.ops.ragged import ragged_attention

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""Names of models in transformers whose layers are alike."""


class FusedLayers(LayerFusion):
    """Fuses norms, MLPs and rotations on a GPU, in float32 and bfloat16; on a CPU, the faster library multiplies."""

    def fuse(self, model: nn.Module) -> None:
        forwards: dict[str, Callable[..., Any]] = {
            "RMSNorm": _rms_norm, "MLP": _mlp, "Attention": _attend, "DecoderLayer": _decode,
        }  # fmt: skip
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
    if _is_converted(layer, x):
        return _project(x, layer)[0]
    is_plain = type(layer.weight) is nn.Parameter and not torch.is_autocast_enabled(x.device.type)
    return (product if is_plain else linear)(x, layer.weight, layer.bias)


def _is_converted(layer: nn.Module, x: Tensor) -> bool:
    """Whether autocast converts a layer's weight from float32 to bfloat16 on a GPU, for a gradient.

    Without one autocast keeps the converted weight, for each step of a generation.
    """
    if type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter or not on_gpu(layer.weight):
        return False
    dtypes = layer.weight.dtype, autocasted(x[:0]).dtype
    needs_grad = torch.is_grad_enabled() and layer.weight.requires_grad
    return needs_grad and dtypes == (torch.float32, torch.bfloat16)


def _project(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """Return the outputs of linear layers, with or without adapters, that read the same x [...,H]."""
    if not all(_is_converted(layer, x) for layer in layers):
        return tuple(layer(x) for layer in layers)
    parameters = [p for layer in layers for p in (layer.weight, layer.bias)]
    outputs = ProductsFunction.apply(autocasted(x).reshape(-1, x.shape[-1]), *parameters)  # type: ignore[no-untyped-call]
    return tuple(output.view(*x.shape[:-1], output.shape[-1]) for output in outputs)


def _decode(layer: Any, hidden_states: Tensor, **options: Any) -> Any:
    """Run a layer as it does itself; sums with the residual stream are those of the norms that read it."""
    x, before, after = hidden_states, layer.input_layernorm, layer.post_attention_layernorm
    if not _fuses(before, x) or not _fuses(after, x):
        return type(layer).forward(layer, x, **options)
    x, normalized = _normalize(before, x)
    attended, _ = layer.self_attn(hidden_states=normalized, **options)
    x, normalized = _normalize(after, x, attended)
    return x + layer.mlp(normalized)


def _normalize(norm: nn.Module, x: Tensor, *addends: Tensor) -> tuple[Tensor, ...]:
    """Return x [...,H], or its sum with an addend, and the norm of what is returned."""
    rows = (t.reshape(-1, t.shape[-1]) for t in (x, *addends))
    function = SumRMSNormFunction if addends else RMSNormFunction
    outputs = function.apply(*rows, norm.weight, norm.variance_epsilon)  # type: ignore[no-untyped-call]
    return tuple(output.view(x.shape) for output in outputs)


def _attend(layer: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **options: Any) -> Any:
    """Attend as the layer does; in a packed pass on a GPU, queries and keys are rotated at once."""
    x, (cos, sin), layout = hidden_states, position_embeddings, options.get("layout")
    if layout is None or "sequence" in options or cos.shape[-1] != layer.head_dim or not _fuses(layer, x):
        return type(layer).forward(layer, x, position_embeddings, **options)
    projected = _project(x, layer.k_proj, layer.v_proj, layer.q_proj)  # sums of gradients end with the long product
    keys, values, queries = (heads.view(x.shape[1], -1, layer.head_dim) for heads in projected)
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
    return _normalize(layer, x)[1]


def _mlp(layer: Any, x: Tensor) -> Tensor:
    if layer.config.hidden_act != "silu" or not _fuses(layer, x):
        return type(layer).forward(layer, x)  # type: ignore[no-any-return]
    flat = autocasted(x).reshape(-1, x.shape[-1])
    gated = SwiGLUFunction.apply(*_project(flat, layer.gate_proj, layer.up_proj))  # type: ignore[no-untyped-call]
    return layer.down_proj(gated).view(x.shape)  # type: ignore[no-any-return]


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Return `1 / rms(x)` [...,1] of x [...,H]."""
    mean_square: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    return mean_square.add_(eps).rsqrt_()


class ProductsFunction(torch.autograd.Function):
    """Products `x @ weight.T + bias` of x [N,H] with several weights [O,H] and biases [O] or None, in the type of x.

    Autograd would round the gradients of weights to this type first, and add the gradients of x in further passes.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        converted = [None if parameter is None else parameter.to(x.dtype) for parameter in parameters]
        ctx.save_for_backward(x, *converted[::2])
        return tuple(map(partial(linear, x), converted[::2], converted[1::2]))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, *weights), (needs_x, *needed) = ctx.saved_tensors, ctx.needs_input_grad
        d_x: Tensor | None = None
        d_parameters: list[Tensor | None] = []
        for i, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
            if needs_x:
                d_x = grad @ weight if d_x is None else add_product_(d_x, grad, weight)
            d_parameters.append(float32_product(grad.T, x) if needed[2 * i] else None)
            d_parameters.append(grad.sum(0, dtype=torch.float32) if needed[2 * i + 1] else None)
        return d_x, *d_parameters


def add_product_(total: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Add `x @ y` to a matrix; a GPU rounds the sum once, a CPU with AVX2 alone would round it more often."""
    return total.addmm_(x, y) if fusion.on_gpu(total) else total.add_(x @ y)


class RMSNormFunction(torch.autograd.Function):
    """x [N,H], and `weight * x / rms(x)` (Zhang and Sennrich 2019, eq. 4), computed in float32.

    What else reads x, reads this output: the backward pass adds its gradient to that of the norm at once.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        output, scale = rms_norm(x, weight, eps, autocasted(x[:0]).dtype)
        ctx.save_for_backward(x, weight, scale)
        ctx.set_materialize_grads(False)
        return x, output

    @staticmethod
    def backward(ctx: Context, d_x: Tensor | None, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        d_weight = rms_norm_weight_grad(grad, x, scale) if ctx.needs_input_grad[1] else None
        if d_x is None:
            return rms_norm_grad(grad, x, weight, scale), d_weight, None
        return added_rms_norm_grad(grad, d_x, x, weight, scale), d_weight, None


class _SumContext(Context, Protocol):
    addend_dtype: torch.dtype


class SumRMSNormFunction(torch.autograd.Function):
    """The sum of x and an addend [N,H], and what `RMSNormFunction` makes of it."""

    @staticmethod
    def forward(ctx: _SumContext, x: Tensor, addend: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, output, scale = sum_rms_norm(x, addend, weight, eps, autocasted(x[:0]).dtype)
        ctx.save_for_backward(total, weight, scale)
        ctx.addend_dtype = addend.dtype
        return total, output

    @staticmethod
    def backward(ctx: _SumContext, d_total: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, scale = ctx.saved_tensors
        d_weight = rms_norm_weight_grad(grad, total, scale) if ctx.needs_input_grad[2] else None
        return *sum_rms_norm_grads(grad, d_total, total, weight, scale, dtype=ctx.addend_dtype), d_weight, None


@Fused
def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the norm [N,H] of x in a dtype, and `1 / rms(x)` [N,1]."""
    scale = inverse_rms(x.float(), eps)
    return (x * scale).mul_(weight).to(dtype), scale


@Fused
def sum_rms_norm(
    x: Tensor, addend: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum [N,H], and what `rms_norm` returns for it."""
    total = x + addend
    return total, *rms_norm.function(total, weight, eps, dtype)


def _norm_grad(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    normalized = x * scale
    weighted = grad.float() * weight
    radial = (weighted * normalized).mean(-1, keepdim=True)  # [N,1], the part along x, which has no effect
    return weighted.sub_(normalized.mul_(radial)).mul_(scale)


@Fused
def rms_norm_grad(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient by x, given that by its norm, and `1 / rms(x)` [N,1]."""
    return _norm_grad(grad, x, weight, scale).to(x.dtype)


@Fused
def added_rms_norm_grad(grad: Tensor, d_x: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return the sum of another gradient by x and `rms_norm_grad`."""
    return _norm_grad(grad, x, weight, scale).add_(d_x).to(x.dtype)


@Fused
def sum_rms_norm_grads(
    grad: Tensor, d_x: Tensor, x: Tensor, weight: Tensor, scale: Tensor, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return `added_rms_norm_grad`, and the same in the dtype of an addend."""
    d_x = _norm_grad(grad, x, weight, scale).add_(d_x)
    return d_x.to(x.dtype), d_x.to(dtype)


@Fused
def rms_norm_weight_grad(grad: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient [H] by the weight."""
    return (x * scale).mul_(grad).sum(0)


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
        return *rotate_back(d_queries, d_keys, cos, sin, d_queries.dtype), None, None


@Fused
def rotate(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return queries and keys, rotated by the angles of `RotationFunction`, in a dtype."""
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    halves = ((x, torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)) for x in (queries, keys))
    rotated_queries, rotated_keys = ((x * cos + turned * sin).to(dtype) for x, turned in halves)
    return rotated_queries, rotated_keys


@Fused
def rotate_back(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Undo `rotate` by the same angles."""
    return rotate.function(queries, keys, cos, -sin, dtype)

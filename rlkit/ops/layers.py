"""Norms and activations with fewer passes over memory than PyTorch's own on a GPU, where they are compiled."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from rlkit.ops.attention import autocasted
from rlkit.ops.autograd import Context
from rlkit.ops.fusion import Fused


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
        return rotate(queries, keys, cos, sin, False, autocasted(cos[:0]).dtype)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *rotate(*grads, *ctx.saved_tensors, True, grads[0].dtype), None, None


@Fused
def rotate(
    queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, back: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return queries and keys, rotated by the angles or `back` by them, in a dtype."""
    cos, sin = cos.float()[:, None], (-sin if back else sin).float()[:, None]
    halves = ((x, torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)) for x in (queries, keys))
    rotated_queries, rotated_keys = ((x * cos + turned * sin).to(dtype) for x, turned in halves)
    return rotated_queries, rotated_keys

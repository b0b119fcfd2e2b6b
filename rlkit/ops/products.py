"""Products in float32: by the faster library of a CPU, and of 16 bits."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

from rlkit.ops import fusion
from rlkit.ops.autograd import Context

ROWS = 64
"""oneDNN's products have multiples of this many rows, since it compiles and keeps kernels for each number."""

MAX_ROWS = 1280
"""Of larger products, of which each size would keep megabytes for its kernels."""

MIN_OPERATIONS = 2**21
"""The least multiplications of a product that are worth the 10 us by which oneDNN takes longer to begin."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias` for x [...,I] and weight [O,I] by the faster library."""
    is_float32_on_cpu = x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu"
    rows = x.numel() // x.shape[-1]
    has_size = rows % ROWS == 0 and rows <= MAX_ROWS and x.numel() * len(weight) >= MIN_OPERATIONS
    if is_float32_on_cpu and has_size and outpaces_mkl():
        return LinearFunction.apply(x, weight, bias)  # type: ignore[no-any-return, no-untyped-call]
    return linear(x, weight, bias)


def float32_product(x: Tensor, y: Tensor) -> Tensor:
    """Return `x @ y` of matrices in 16 bits in float32, in which a GPU sums it."""
    return torch.mm(x, y, out_dtype=torch.float32) if fusion.on_gpu(x) else x.float() @ y.float()


@cache
def outpaces_mkl() -> bool:
    """Whether oneDNN's products in float32 are faster than MKL's: on AMD with AVX512, where MKL uses AVX2.

    Large ones are 2.2 times as fast on Zen 5. The choice depends on the CPU alone: runs repeat and resume bit for bit.
    """
    cpu, has_onednn = torch.cpu.get_capabilities(), hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_onednn and bool(cpu.get("avx512_f")) and "AMD" in str(cpu.get("cpu_name"))


class LinearFunction(torch.autograd.Function):
    """`product` by oneDNN, for x [...,I], weight [O,I] and bias [O] or None."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _by_onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)  # [N,O]
        d_x = _by_onednn(grad, weight.T) if needs_x else None
        d_weight = _by_onednn(rows.T, x.flatten(0, -2).T) if needs_weight else None
        return d_x, d_weight, rows.sum(0) if needs_bias else None


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    bias = None if bias is None else bias.contiguous()  # others are read as if they were
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]

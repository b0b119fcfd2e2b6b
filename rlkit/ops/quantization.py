"""Linear layers whose frozen weights are held in 4 bits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of a kernel that is not used here

BLOCK, SCALES = 64, 256
"""Weights that share a scale of 8 bits, and such scales that share one of 32 bits."""

BITS = 4 + 8 / BLOCK + 32 / (BLOCK * SCALES)
"""Bits of a weight in nf4, with its scales."""

PARTS = ("codes", "scales", "scales_of_scales", "values_of_scales", "offset")
"""The tensors of a weight in 4 bits: two weights in a byte [N/2,1], two levels of scales, the 256 values that scales
have, and what is added to them."""


class QuantizedLinear(nn.Linear):
    """A linear layer with a frozen weight in NF4, doubly quantized: QLoRA (Dettmers et al. 2023, arXiv:2305.14314).

    `weight` is dequantized by each access, and backward passes dequantize it again instead of keeping it. The weight is
    rounded to bfloat16 before it is quantized, so that the result does not depend on the type in which it was loaded.

    Unlike `bitsandbytes.nn.Linear4bit`, a pass never changes the layer (on some CPUs that one rewrites its weight to
    compute in bfloat16), and all 4-bit tensors are frozen parameters of bytes, which strategies shard and no cast
    changes.

    Args:
        layer: The layer to quantize, which is not changed; on the meta device, so are the 4-bit tensors.

    Raises:
        ImportError: bitsandbytes is not installed.
    """

    codes: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.bias = layer.bias
        self.dtype = layer.weight.dtype
        for name, tensor in zip(PARTS, _quantize(layer.weight.detach()), strict=True):
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dequantized weight [O,I], in the type of the layer that was quantized."""
        return self.dequantize()

    @property
    def shape(self) -> torch.Size:
        """The shape of the dequantized weight."""
        return torch.Size((self.out_features, self.in_features))

    def dequantize(self, gather: Callable[[Tensor], Tensor] = torch.detach) -> Tensor:
        """Return `weight`; `gather` returns a whole 4-bit tensor, a collective if they are sharded."""
        from bitsandbytes.functional import QuantState, dequantize_4bit

        # FSDP2 of torch 2.11 casts bytes as well to bfloat16, which holds them exactly
        codes, scales, *tables = (gather(getattr(self, name)).to(torch.uint8) for name in PARTS)  # agreed: always these
        if codes.is_meta:
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        scales_of_scales, values_of_scales, offset = (table.view(torch.float32) for table in tables)
        nested = QuantState(scales_of_scales, code=values_of_scales, blocksize=SCALES, dtype=torch.float32)
        state = QuantState(
            scales, self.shape, blocksize=BLOCK, quant_type="nf4", dtype=torch.float32, offset=offset, state2=nested
        )
        return dequantize_4bit(codes, state).to(self.dtype)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return QuantizedLinearFunction.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]

    def dequantized(self) -> nn.Linear:
        """Return the layer with its dequantized weight."""
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight = nn.Parameter(self.weight, requires_grad=False)
        layer.bias = self.bias
        return layer

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Let a cast of the module change the type of the dequantized weight alone."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.codes.device)).dtype
        return self


def _quantize(weight: Tensor) -> tuple[Tensor, ...]:
    """Return the 4-bit tensors of a weight [O,I] in the order of `PARTS`, all of them as bytes."""
    blocks = -(-weight.numel() // BLOCK)
    if weight.is_meta:
        shapes = ((-(-weight.numel() // 2), 1), (blocks,), (4 * -(-blocks // SCALES),), (4 * SCALES,), (4,))
        return tuple(torch.empty(shape, dtype=torch.uint8, device="meta") for shape in shapes)
    from bitsandbytes.functional import quantize_4bit

    rounded = weight.to(torch.bfloat16).float()
    codes, state = quantize_4bit(rounded, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
    tables = (state.state2.absmax, state.state2.code, state.offset.view(1))
    return codes, state.absmax, *(table.view(torch.uint8) for table in tables)


class QuantizedLinearFunction(torch.autograd.Function):
    """A linear layer for x [...,I] with a frozen `QuantizedLinear`, which the backward pass dequantizes again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        ctx.dtype = x.dtype
        weight = layer.weight if torch.is_autocast_enabled(x.device.type) else layer.weight.to(x.dtype)  # as FSDP2 does
        return linear(x, weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad @ ctx.layer.weight.to(grad.dtype)).to(ctx.dtype), None


def replace_layers(model: nn.Module, old: type[nn.Linear], new: Callable[[Any], nn.Linear]) -> None:
    """Replace all linear layers of exactly one class inside a module."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is old:
                setattr(parent, name, new(layer))

"""Linear layers whose frozen weights are held in 4 bits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of a kernel that is not used here

BITS = 4 + 8 / 64 + 32 / (64 * 256)
"""Bits of a weight in nf4: its own, a scale of 8 bits for 64 weights, and one of 32 bits for 256 such scales."""


class QuantizedLinear(nn.Linear):
    """A linear layer with a frozen weight in NF4, doubly quantized: QLoRA (Dettmers et al. 2023, arXiv:2305.14314).

    `weight` is dequantized by each access, and backward passes dequantize it again instead of keeping it. The weight is
    rounded to bfloat16 before it is quantized, so that the result does not depend on the type in which it was loaded.

    Unlike `bitsandbytes.nn.Linear4bit`, a pass never changes the layer (on some CPUs that one rewrites its weight to
    compute in bfloat16), and the 4-bit tensors are no parameters: they are not saved, cast or sent to other ranks.

    Args:
        layer: The layer to quantize, which is not changed.

    Raises:
        ImportError: bitsandbytes is not installed.
    """

    def __init__(self, layer: nn.Linear) -> None:
        from bitsandbytes.functional import quantize_4bit

        nn.Module.__init__(self)
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.bias = layer.bias
        self.dtype = layer.weight.dtype
        rounded = layer.weight.detach().to(torch.bfloat16).float()
        self._packed, self._state = quantize_4bit(rounded, compress_statistics=True, quant_type="nf4")

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dequantized weight [O,I], in the type of the layer that was quantized."""
        from bitsandbytes.functional import dequantize_4bit

        weight: Tensor = dequantize_4bit(self._packed, self._state)
        return weight.to(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight in 4 bits, with its scales."""
        return sum(getattr(owner, name).nbytes for owner, name in self._tensors())

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = QuantizedLinearFunction.apply(x, self)  # type: ignore[no-untyped-call]
        return output

    def dequantized(self) -> nn.Linear:
        """Return the layer with its dequantized weight."""
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight = nn.Parameter(self.weight, requires_grad=False)
        layer.bias = self.bias
        return layer

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the 4-bit tensors with the module; a cast changes the type of the dequantized weight alone."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.dtype = fn(self._packed.new_empty(0, dtype=self.dtype)).dtype
        for owner, name in self._tensors():
            tensor = getattr(owner, name)
            moved = fn(tensor)
            setattr(owner, name, moved if moved.dtype == tensor.dtype else tensor.to(moved.device))
        return self

    def _tensors(self) -> list[tuple[Any, str]]:
        """Return the owners and names of the 4-bit tensors: codes, and two levels of scales."""
        state, nested = self._state, self._state.state2
        return [
            (self, "_packed"),
            (state, "absmax"),
            (state, "code"),
            (state, "offset"),
            (nested, "absmax"),
            (nested, "code"),
        ]


class _QuantizedContext(Protocol):
    layer: QuantizedLinear
    dtype: torch.dtype


class QuantizedLinearFunction(torch.autograd.Function):
    """A linear layer for x [...,I] with a frozen `QuantizedLinear`, which the backward pass dequantizes again."""

    @staticmethod
    def forward(ctx: _QuantizedContext, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        ctx.dtype = x.dtype
        return linear(x, layer.weight, layer.bias)

    @staticmethod
    def backward(ctx: _QuantizedContext, grad: Tensor) -> tuple[Tensor, None]:
        return (grad @ ctx.layer.weight.to(grad.dtype)).to(ctx.dtype), None


def replace_layers(model: nn.Module, old: type[nn.Linear], new: Callable[[Any], nn.Linear], but: object = None) -> None:
    """Replace all linear layers of exactly one class, except the layer `but`."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is old and layer is not but:
                setattr(parent, name, new(layer))

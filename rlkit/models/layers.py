"""Layers that compute less: in fewer kernels on a GPU, and for fewer tokens in a packed pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlkit.ops import layers
from rlkit.ops.attention import autocasted
from rlkit.ops.fusion import on_gpu
from rlkit.ops.products import product

Forward = Callable[[Any, Tensor], Tensor]
"""A function from a layer and its input [N,I] to its output [N,O]."""


def fuse_layers(model: nn.Module) -> None:
    """Make norms and MLPs of a model take fewer passes over memory on a GPU, in float32 and bfloat16.

    On a CPU linear layers are multiplied by the faster library.
    """
    for layer in model.modules():
        if type(layer) is nn.Linear:
            layer.forward = partial(_linear, layer)  # type: ignore[method-assign]
        forward = _forward_of(layer)
        if forward is not None:
            layer.forward = partial(_dispatch, layer, forward)  # type: ignore[assignment]


def narrow_last_mlp(backbone: nn.Module) -> None:
    """Let the last layer's MLP compute only the tokens of a packed pass whose hidden states are read: `Layout.read`.

    Prompts have no loss. Only their keys and values in the last layer matter, not what follows.
    """
    layers: Any = getattr(backbone, "layers", None)
    mlp: Any = getattr(layers[-1], "mlp", None) if layers else None
    if type(mlp).__name__.endswith("MLP") and not hasattr(mlp, "experts") and not isinstance(mlp.forward, _NarrowMLP):
        mlp.forward = _NarrowMLP(mlp.forward)
        layers[-1].register_forward_pre_hook(mlp.forward.begin, with_kwargs=True)


class _NarrowMLP:
    """The forward pass of an MLP, which returns 0 for tokens that are not read."""

    def __init__(self, forward: Callable[[Tensor], Tensor]) -> None:
        self._forward = forward
        self._read: Tensor | None = None

    def begin(self, _: nn.Module, __: object, options: dict[str, Any]) -> None:
        """Get the tokens to read from the arguments of the layer."""
        self._read = getattr(options.get("layout"), "read", None)

    def __call__(self, x: Tensor) -> Tensor:
        if self._read is None or isinstance(x, DTensor):
            return self._forward(x)
        output = self._forward(x.index_select(1, self._read))
        return output.new_zeros(*x.shape[:2], output.shape[-1]).index_copy(1, self._read, output)


def _forward_of(layer: nn.Module) -> Forward | None:
    name = type(layer).__name__
    if name in {f"{family}RMSNorm" for family in ("Llama", "Mistral", "Qwen2", "Qwen3")}:
        return _rms_norm
    if name in {f"{family}MLP" for family in ("Llama", "Mistral", "Qwen2", "Qwen3")}:
        return _mlp if getattr(layer.config, "hidden_act", "") == "silu" else None
    return None


def _dispatch(layer: nn.Module, forward: Forward, x: Tensor, *args: object, **options: object) -> Tensor:
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
    dtypes = {torch.float32, torch.bfloat16, torch.uint8}  # bytes are those of weights in 4 bits
    if (
        args
        or options
        or dtype not in dtypes
        or any(t.dtype not in dtypes or not on_gpu(t) or isinstance(t, DTensor) for t in (x, *layer.parameters()))
    ):
        return type(layer).forward(layer, x, *args, **options)  # type: ignore[no-any-return]
    out = forward(layer, x.reshape(-1, x.shape[-1]))
    return out.view(*x.shape[:-1], out.shape[-1])


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    is_plain = type(layer.weight) is nn.Parameter and not torch.is_autocast_enabled(x.device.type)
    return (product if is_plain else nn.functional.linear)(x, layer.weight, layer.bias)


def _rms_norm(layer: Any, x: Tensor) -> Tensor:
    return layers.RMSNormFunction.apply(x, layer.weight, layer.variance_epsilon)  # type: ignore[no-any-return, no-untyped-call]


def _mlp(layer: Any, x: Tensor) -> Tensor:
    x = autocasted(x)
    return layer.down_proj(layers.SwiGLUFunction.apply(layer.gate_proj(x), layer.up_proj(x)))  # type: ignore[no-any-return, no-untyped-call]

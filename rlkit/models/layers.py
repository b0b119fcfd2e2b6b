"""Layers that compute less: in fewer kernels on a GPU, and for fewer tokens in a packed pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlkit.ops import layers
from rlkit.ops.attention import Scoring, autocasted
from rlkit.ops.fusion import on_gpu
from rlkit.ops.ragged import ragged_attention

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""Names of models in transformers whose layers are alike."""

Forward = Callable[[Any, Tensor], Tensor]
"""A function from a layer and its input [N,I] to its output [N,O]."""


def fuse_layers(model: nn.Module) -> None:
    """Make norms, MLPs and rotations of a model take fewer passes over memory on a GPU, in float32 and bfloat16."""
    for layer in model.modules():
        if type(layer).__name__ in {f"{family}Attention" for family in FAMILIES}:
            layer.forward = partial(_attend, layer)
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
        layout = options.get("layout")
        self._read = None if layout is None else layout.read

    def __call__(self, x: Tensor) -> Tensor:
        if self._read is None or isinstance(x, DTensor):
            return self._forward(x)
        output = self._forward(x.index_select(1, self._read))
        return output.new_zeros(*x.shape[:2], output.shape[-1]).index_copy(1, self._read, output)


def _forward_of(layer: nn.Module) -> Forward | None:
    name = type(layer).__name__
    if name in {f"{family}RMSNorm" for family in FAMILIES}:
        return _rms_norm
    if name in {f"{family}MLP" for family in FAMILIES}:
        return _mlp if getattr(layer.config, "hidden_act", "") == "silu" else None
    return None


def _dispatch(layer: nn.Module, forward: Forward, x: Tensor, *args: object, **options: object) -> Tensor:
    if args or options or not _fuses(layer, x):
        return type(layer).forward(layer, x, *args, **options)  # type: ignore[no-any-return]
    out = forward(layer, x.reshape(-1, x.shape[-1]))
    return out.view(*x.shape[:-1], out.shape[-1])


def _fuses(layer: nn.Module, x: Tensor) -> bool:
    """Whether a layer and its input have the types and the device of fused passes."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
    dtypes = {torch.float32, torch.bfloat16, torch.uint8}  # bytes are those of weights in 4 bits
    tensors = (x, *layer.parameters())
    return dtype in dtypes and all(t.dtype in dtypes and on_gpu(t) and not isinstance(t, DTensor) for t in tensors)


def _attend(layer: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **options: Any) -> Any:
    """Attend as the layer does; in a packed pass on a GPU, queries and keys are rotated at once."""
    x, (cos, sin), layout = hidden_states, position_embeddings, options.get("layout")
    if layout is None or "sequence" in options or cos.shape[-1] != layer.head_dim or not _fuses(layer, x):
        return type(layer).forward(layer, x, position_embeddings, **options)
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    queries, keys, values = (project(x).view(x.shape[1], -1, layer.head_dim) for project in projections)
    if hasattr(layer, "q_norm"):
        queries, keys = layer.q_norm(queries), layer.k_norm(keys)
    queries, keys = layers.RotationFunction.apply(queries, keys, cos.squeeze(0), sin.squeeze(0))  # type: ignore[no-untyped-call]
    window = getattr(layer, "sliding_window", getattr(layer.config, "sliding_window", None))
    layout.windows.append(window)
    output = ragged_attention(queries, keys, values, Scoring(layer.scaling, window), layout)
    return layer.o_proj(output.reshape(*x.shape[:-1], -1)), None


def _rms_norm(layer: Any, x: Tensor) -> Tensor:
    return layers.RMSNormFunction.apply(x, layer.weight, layer.variance_epsilon)  # type: ignore[no-any-return, no-untyped-call]


def _mlp(layer: Any, x: Tensor) -> Tensor:
    x = autocasted(x)
    return layer.down_proj(layers.SwiGLUFunction.apply(layer.gate_proj(x), layer.up_proj(x)))  # type: ignore[no-any-return, no-untyped-call]

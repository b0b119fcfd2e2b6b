"""Layers that compute less: for fewer tokens in a packed pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


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

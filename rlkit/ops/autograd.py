"""The type of what autograd hands to a function's forward and backward passes."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Context(Protocol):
    """Keeps tensors of the forward pass for the backward pass."""

    saved_tensors: tuple[Any, ...]
    """What `save_for_backward` got: a tensor or None each."""
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_non_differentiable(self, *outputs: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...

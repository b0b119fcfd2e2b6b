"""Optimizers of torch by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from rlkit.base.errors import RecipeError, show
from rlkit.base.ranges import FiniteFloat, FiniteInt
from rlkit.interfaces.optimizer import Optimizer, WeightGroup

if TYPE_CHECKING:
    import torch

Value = bool | FiniteInt | FiniteFloat | list[FiniteFloat]
RESERVED = ("params", "lr", "weight_decay", "maximize", "differentiable", "capturable")
"""Arguments that the training loop sets or does not support."""


class TorchOptimizer(Optimizer):
    """An optimizer of torch.optim by name.

    Args:
        name: Name of the class.
        options: Arguments of its constructor by name; null for the defaults. `lr` and `weight_decay` are options of the
            section instead.
    """

    formula = "{name}({arguments})"

    def __init__(
        self,
        name: Literal["SGD", "RMSprop", "Adam", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "ASGD", "Adafactor"],
        options: dict[str, Value] | None = None,
    ) -> None:
        self.name = name
        self.takes_shards = name != "Adafactor"
        self.options: Mapping[str, Value] = options or {}
        self.arguments = ", ".join(f"{key}={value}" for key, value in self.options.items())
        self._check()

    def make(self, groups: Sequence[WeightGroup], lr: float) -> torch.optim.Optimizer:
        """Return the optimizer."""
        import torch

        optimizer: torch.optim.Optimizer = getattr(torch.optim, self.name)(
            [group.options() for group in groups], lr=lr, **self.options
        )
        return optimizer

    def _check(self) -> None:
        """Construct the optimizer for a dummy weight, so that a wrong argument is refused before a model is loaded."""
        import torch

        reserved = sorted(set(self.options) & set(RESERVED))
        if reserved:
            name = reserved[0]
            raise RecipeError(f"TorchOptimizer has the option {name!r}, which is not its own; set train.{name}")
        try:
            getattr(torch.optim, self.name)([torch.zeros(1, requires_grad=True)], **self.options)
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise RecipeError(f"torch.optim.{self.name} refuses {show(dict(self.options))}: {error}") from error

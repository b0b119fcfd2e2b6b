"""Any other optimizer of torch.optim, by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from rlkit.errors import RecipeError, show
from rlkit.interfaces.optimizer import Optimizer, WeightGroup
from rlkit.ranges import FiniteFloat, FiniteInt

if TYPE_CHECKING:
    import torch

Value = bool | FiniteInt | FiniteFloat | list[FiniteFloat]
OF_THE_LOOP = ("params", "lr", "weight_decay", "maximize", "differentiable", "capturable")
"""Arguments that the loop sets, or cannot do with."""


class TorchOptimizer(Optimizer):
    """An optimizer of torch.optim, by its name.

    Args:
        name: The class.
        options: Its constructor's other arguments by name; null for its defaults. `lr` and `weight_decay` are the
            section's.
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
        """Return it."""
        import torch

        made: torch.optim.Optimizer = getattr(torch.optim, self.name)(
            [group.options() for group in groups], lr=lr, **self.options
        )
        return made

    def _check(self) -> None:
        """Make one of nothing, so that a wrong argument is an error before a model is loaded."""
        import torch

        if taken := sorted(set(self.options) & set(OF_THE_LOOP)):
            raise RecipeError(f"TorchOptimizer has the option {taken[0]!r}, which is not its own; set train.{taken[0]}")
        try:
            getattr(torch.optim, self.name)([torch.zeros(1, requires_grad=True)], **self.options)
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise RecipeError(f"torch.optim.{self.name} refuses {show(dict(self.options))}: {error}") from error

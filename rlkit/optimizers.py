"""Optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Le

from rlkit.base.errors import RecipeError, show
from rlkit.base.ranges import NUMBER, Beta, FiniteFloat, FiniteInt, PositiveFloat
from rlkit.interfaces.optimizer import Optimizer, WeightGroup, WeightKind

if TYPE_CHECKING:
    import torch

__all__ = ["AdamW", "Muon", "TorchOptimizer"]

Value = bool | FiniteInt | FiniteFloat | list[FiniteFloat]
RESERVED = ("params", "lr", "weight_decay", "maximize", "differentiable", "capturable")
"""Arguments that the training loop sets or does not support."""


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101), fused where torch can.

    Args:
        betas: Decays of the first and the second moment.
        eps: Number added to the root of the second moment.
    """

    formula = "betas {betas}, eps {eps:g}"

    def __init__(self, betas: tuple[Beta, Beta] = (0.9, 0.999), eps: PositiveFloat = 1e-8) -> None:
        self.betas = betas
        self.eps = eps

    def make(self, groups: Sequence[WeightGroup], lr: float) -> torch.optim.Optimizer:
        """Return torch's AdamW."""
        import torch

        fused = {weight.device.type for group in groups for weight in group.weights} <= {"cpu", "cuda"}
        options = [group.options() for group in groups]
        return torch.optim.AdamW(options, lr=lr, betas=self.betas, eps=self.eps, fused=fused)


class Muon(Optimizer):
    """Momentum orthogonalized by Newton-Schulz steps (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

    It updates the matrices of the transformer's blocks; AdamW updates embeddings, heads and vectors. Updates are scaled
    to the size of AdamW's (Liu et al. 2025, arXiv:2502.16982, eq. 4), so both share one `lr` and one `weight_decay`.

    Args:
        momentum: Decay of the momentum.
        nesterov: Whether to use Nesterov momentum.
        newton_schulz_steps: Number of steps that orthogonalize an update.
        betas: AdamW's betas.
        eps: AdamW's eps.
    """

    formula = "momentum {momentum} on the blocks' matrices, AdamW betas {betas}, eps {eps:g} on the rest"

    def __init__(
        self,
        momentum: Beta = 0.95,
        nesterov: bool = True,
        newton_schulz_steps: Annotated[int, Ge(1), Le(20), NUMBER] = 5,
        betas: tuple[Beta, Beta] = (0.9, 0.999),
        eps: PositiveFloat = 1e-8,
    ) -> None:
        self.momentum = momentum
        self.nesterov = nesterov
        self.newton_schulz_steps = newton_schulz_steps
        self.betas = betas
        self.eps = eps

    def make(self, groups: Sequence[WeightGroup], lr: float) -> torch.optim.Optimizer:
        """Return Muon and AdamW as one optimizer.

        Raises:
            RecipeError: The model has no trained matrices in blocks.
        """
        import torch

        from rlkit.ops.optimizers import Combined

        matrices = [group.options() for group in groups if group.kind is WeightKind.MATRIX]
        others = [group for group in groups if group.kind is not WeightKind.MATRIX]
        if not matrices:
            raise RecipeError("optimizer Muon found no trainable matrix in a transformer block; choose AdamW")
        muon = torch.optim.Muon(
            matrices,
            lr=lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            ns_steps=self.newton_schulz_steps,
            adjust_lr_fn="match_rms_adamw",
        )
        return Combined([muon, AdamW(self.betas, self.eps).make(others, lr)]) if others else muon


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

        options = [group.options() for group in groups]
        return getattr(torch.optim, self.name)(options, lr=lr, **self.options)  # type: ignore[no-any-return]

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

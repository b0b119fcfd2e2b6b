"""Momentum that is orthogonalized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Le

from rlkit.base.errors import RecipeError
from rlkit.base.ranges import NUMBER, Beta, PositiveFloat
from rlkit.interfaces.optimizer import Optimizer, WeightGroup, WeightKind
from rlkit.optimizers import AdamW

if TYPE_CHECKING:
    import torch


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

        from rlkit_optimizers.combined import Combined

        matrices = [group.options() for group in groups if group.kind is WeightKind.MATRIX]
        adamw_groups = [group for group in groups if group.kind is not WeightKind.MATRIX]
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
        return Combined([muon, AdamW(self.betas, self.eps).make(adamw_groups, lr)]) if adamw_groups else muon

"""Optimizers: the default, and by name those of packages that come with rlkit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlkit.base.ranges import Beta, PositiveFloat
from rlkit.interfaces.optimizer import Optimizer, WeightGroup
from rlkit.registry.shelf import attribute_of

if TYPE_CHECKING:
    import torch

__all__ = ["AdamW"]

__getattr__ = attribute_of("optimizers")


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

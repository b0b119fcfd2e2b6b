"""Learning-rate schedules."""

from __future__ import annotations

import math

from rlkit.base.ranges import Share
from rlkit.interfaces.optimizer import Schedule

__all__ = ["Constant", "Cosine", "Linear"]


class Constant(Schedule):
    """Keeps the learning rate constant."""

    def factor(self, progress: float) -> float:
        """Return 1."""
        return 1.0


class Cosine(Schedule):
    """Decays the learning rate along half a cosine to a floor (Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5).

    Args:
        min_lr_ratio: The floor as a share of `lr`.
    """

    formula = "to {min_lr_ratio:g} lr"

    def __init__(self, min_lr_ratio: Share = 0.0) -> None:
        self.min_lr_ratio = min_lr_ratio

    def factor(self, progress: float) -> float:
        """Return floor + (1 - floor) * (1 + cos(pi * progress)) / 2."""
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


class Linear(Schedule):
    """Decays the learning rate linearly to a floor.

    Args:
        min_lr_ratio: The floor as a share of `lr`.
    """

    formula = "to {min_lr_ratio:g} lr"

    def __init__(self, min_lr_ratio: Share = 0.0) -> None:
        self.min_lr_ratio = min_lr_ratio

    def factor(self, progress: float) -> float:
        """Return floor + (1 - floor) * (1 - progress)."""
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * (1 - progress)

"""A learning rate that decays linearly."""

from __future__ import annotations

from rlkit.interfaces.optimizer import Schedule
from rlkit.ranges import Share


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

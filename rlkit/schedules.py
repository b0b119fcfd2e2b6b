"""Learning-rate schedules, all functions of the completed share of the steps after the warm-up."""

from __future__ import annotations

import math
from abc import abstractmethod

from rlkit.base.ranges import PositiveFloat, Share
from rlkit.interfaces.optimizer import Schedule
from rlkit.registry.shelf import attribute_of

__all__ = ["Constant", "Cosine", "Linear"]

__getattr__ = attribute_of("schedules")


class Constant(Schedule):
    """Keeps the learning rate constant."""

    def factor(self, progress: float) -> float:
        """Return 1."""
        return 1.0


class Decay(Schedule):
    """Decays the learning rate from `lr` to a floor. Override `shape`."""

    formula = "to {min_lr_ratio:g} lr"
    min_lr_ratio: float

    def factor(self, progress: float) -> float:
        """Return floor + (1 - floor) * shape."""
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * self.shape(progress)

    @abstractmethod
    def shape(self, progress: float) -> float:
        """Return the share of the way from the floor to `lr`: 1 at a progress of 0."""


class Cosine(Decay):
    """Decays the learning rate along a cosine to a floor (Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5).

    Args:
        min_lr_ratio: The floor as a share of `lr`.
        num_cycles: Waves of the cosine; 0.5 falls once and does not rise again.
    """

    formula = "to {min_lr_ratio:g} lr, {num_cycles:g} waves"

    def __init__(self, min_lr_ratio: Share = 0.0, num_cycles: PositiveFloat = 0.5) -> None:
        self.min_lr_ratio = min_lr_ratio
        self.num_cycles = num_cycles

    def shape(self, progress: float) -> float:
        """Return (1 + cos(2 * pi * num_cycles * progress)) / 2."""
        return 0.5 * (1 + math.cos(2 * math.pi * self.num_cycles * progress))


class Linear(Decay):
    """Decays the learning rate linearly to a floor.

    Args:
        min_lr_ratio: The floor as a share of `lr`.
    """

    def __init__(self, min_lr_ratio: Share = 0.0) -> None:
        self.min_lr_ratio = min_lr_ratio

    def shape(self, progress: float) -> float:
        """Return 1 - progress."""
        return 1 - progress

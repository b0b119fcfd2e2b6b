"""Learning-rate schedules that few recipes need, functions of the completed share of the steps after the warm-up."""

from __future__ import annotations

import math
from typing import Literal

from rlkit.base.ranges import PositiveFloat, PositiveInt, PositiveShare, Share
from rlkit.schedules import Decay


class CosineRestarts(Decay):
    """Decays the learning rate along half a cosine several times, each from `lr` (arXiv:1608.03983, section 3).

    Args:
        min_lr_ratio: The floor as a share of `lr`.
        num_cycles: Number of decays, of equal length.
    """

    formula = "to {min_lr_ratio:g} lr, {num_cycles} times"

    def __init__(self, min_lr_ratio: Share = 0.0, num_cycles: PositiveInt = 2) -> None:
        self.min_lr_ratio = min_lr_ratio
        self.num_cycles = num_cycles

    def shape(self, progress: float) -> float:
        """Return (1 + cos(pi * share of the current cycle)) / 2."""
        return 0.5 * (1 + math.cos(math.pi * (self.num_cycles * progress % 1)))


class Polynomial(Decay):
    """Decays the learning rate as a power of the steps that remain.

    Args:
        power: The exponent: 1 is `Linear`, more decays sooner.
        min_lr_ratio: The floor as a share of `lr`.
    """

    formula = "of power {power:g} to {min_lr_ratio:g} lr"

    def __init__(self, power: PositiveFloat = 2.0, min_lr_ratio: Share = 0.0) -> None:
        self.power = power
        self.min_lr_ratio = min_lr_ratio

    def shape(self, progress: float) -> float:
        """Return (1 - progress) ** power."""
        return float((1 - progress) ** self.power)


class WarmupStableDecay(Decay):
    """Keeps the learning rate constant, then decays it in the last steps (WSD: Hu et al. 2024, arXiv:2404.06395).

    Args:
        decay_share: Share of the steps after the warm-up in which the rate decays.
        decay: Form of the decay: `linear`, `cosine` or `1-sqrt` (Hagele et al. 2024, arXiv:2405.18392).
        min_lr_ratio: The floor as a share of `lr`.
    """

    formula = "{decay} in the last {decay_share:.0%} to {min_lr_ratio:g} lr"

    def __init__(
        self,
        decay_share: PositiveShare = 0.2,
        decay: Literal["linear", "cosine", "1-sqrt"] = "linear",
        min_lr_ratio: Share = 0.0,
    ) -> None:
        self.decay_share = decay_share
        self.decay = decay
        self.min_lr_ratio = min_lr_ratio

    def shape(self, progress: float) -> float:
        """Return 1 before the decay, then its form at its completed share."""
        completed = max(0.0, 1 - (1 - progress) / self.decay_share)
        if self.decay == "cosine":
            return 0.5 * (1 + math.cos(math.pi * completed))
        return 1 - (math.sqrt(completed) if self.decay == "1-sqrt" else completed)

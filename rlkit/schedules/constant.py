"""A constant learning rate."""

from __future__ import annotations

from rlkit.interfaces.optimizer import Schedule


class Constant(Schedule):
    """Keeps the learning rate constant."""

    def factor(self, progress: float) -> float:
        """Return 1."""
        return 1.0

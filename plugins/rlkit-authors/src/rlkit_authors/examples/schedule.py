"""A schedule that a recipe names: `train: {schedule: {class_path: StableDecay, init_args: {decay: 0.2}}}`.

[project.entry-points.rlkit]
stable-decay = "rlkit_stable_decay"
"""

from __future__ import annotations

from rlkit.base.ranges import PositiveShare
from rlkit.hooks import Register, hookimpl
from rlkit.interfaces.optimizer import Schedule


class StableDecay(Schedule):
    """Keeps the learning rate, and lowers it on a line to 0 in the last steps (warm-up, stable, decay).

    Args:
        decay: The last steps, as a share of those after the warm-up.
    """

    formula = "to 0 in the last {decay:.0%} of the steps"

    def __init__(self, decay: PositiveShare = 0.2) -> None:
        self.decay = decay

    def factor(self, progress: float) -> float:
        """Return the share of `train.lr` after a share of the steps; it has no state, so that a run can be resumed."""
        return min(1.0, (1 - progress) / self.decay)


@hookimpl
def rlkit_register(register: Register) -> None:
    """Register the class; that it is a schedule follows from the interface that it subclasses."""
    register(StableDecay)

"""A reward that a recipe names: `reward: {class_path: Brevity, init_args: {limit: 40}}`.

[project.entry-points.rlkit]
brevity = "rlkit_brevity"
"""

from __future__ import annotations

from rlkit.base.ranges import PositiveInt
from rlkit.hooks import Register, hookimpl
from rlkit.interfaces.reward import RewardFunction
from rlkit.types import Trajectory


class Brevity(RewardFunction):
    """1 for an answer of at most `limit` characters, else 0.

    Args:
        limit: The characters that are allowed.
    """

    def __init__(self, limit: PositiveInt = 80) -> None:
        self.limit = limit

    def grade(self, trajectory: Trajectory) -> float:
        """Return the score of one answer; this runs in a worker process, which is killed at its deadline."""
        return float(len(trajectory.text) <= self.limit)


@hookimpl
def rlkit_register(register: Register) -> None:
    """Register the class; that it is a reward follows from the interface that it subclasses."""
    register(Brevity)

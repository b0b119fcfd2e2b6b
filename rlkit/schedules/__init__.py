"""Learning-rate schedules."""

from rlkit.schedules.constant import Constant
from rlkit.schedules.cosine import Cosine
from rlkit.schedules.linear import Linear

__all__ = ["Constant", "Cosine", "Linear"]

"""Advantage estimators, one per file.

What belongs here: an estimator's formula with its source, and the options in it. What does not: the shaping and
correction of rewards before it (`rlkit.train.credit`), and the mathematics that several share (`rlkit.ops`).
"""

from rlkit.advantages.gae import GAE
from rlkit.advantages.grpo import GRPO
from rlkit.advantages.reinforce_pp import ReinforcePP
from rlkit.advantages.remax import ReMax
from rlkit.advantages.rloo import RLOO
from rlkit.registry.shelf import attribute_of

__all__ = ["GAE", "GRPO", "RLOO", "ReMax", "ReinforcePP"]

__getattr__ = attribute_of("advantages")

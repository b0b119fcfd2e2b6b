"""Rewards, one per file.

What belongs here: rewards of Python functions. What does not: rewards of the shelf
(`rlkit_math`, `rlkit_rewards`), and workers and deadlines (`rlkit.rollout.scoring`).
"""

from rlkit.registry.shelf import attribute_of
from rlkit.rewards.python import PythonReward
from rlkit.rewards.python_batch import BatchReward

__all__ = ["BatchReward", "PythonReward"]

__getattr__ = attribute_of("rewards")

"""Rewards: one a file."""

from rlkit.rewards.exact import ExactReward
from rlkit.rewards.math import MathReward

__all__ = ["ExactReward", "MathReward"]

"""Curricula: which training prompts come sooner, and which more often."""

from rlkit.curricula.difficulty import Difficulty
from rlkit.curricula.success_rate import SuccessRate

__all__ = ["Difficulty", "SuccessRate"]

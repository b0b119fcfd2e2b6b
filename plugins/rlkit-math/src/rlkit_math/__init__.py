"""Final answers that are numbers, formulae or words: their grammar and comparison, and the parts that grade by them."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_math.calculator import Calculator
from rlkit_math.retry import Retry
from rlkit_math.reward import MathReward

__all__ = ["Calculator", "MathReward", "Retry"]


@hookimpl
def rlkit_register(register: Register) -> None:
    register(Calculator)
    register(MathReward)
    register(Retry)

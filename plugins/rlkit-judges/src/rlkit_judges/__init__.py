"""Rewards by a language model that is asked: comparisons and scores (`JudgeReward`), and criteria (`RubricReward`)."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_judges.judge import JudgeReward
from rlkit_judges.rubric import RubricReward

__all__ = ["JudgeReward", "RubricReward"]


@hookimpl
def rlkit_register(register: Register) -> None:
    register(JudgeReward)
    register(RubricReward)

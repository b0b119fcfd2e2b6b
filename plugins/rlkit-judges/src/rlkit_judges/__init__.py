"""Rewards by models: comparisons and scores (`JudgeReward`), criteria (`RubricReward`), classifiers (`ModelReward`)."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_judges.judge import JudgeReward
from rlkit_judges.model import ModelReward
from rlkit_judges.rubric import RubricReward

__all__ = ["JudgeReward", "ModelReward", "RubricReward"]


@hookimpl
def rlkit_register(register: Register) -> None:
    register(JudgeReward)
    register(ModelReward)
    register(RubricReward)

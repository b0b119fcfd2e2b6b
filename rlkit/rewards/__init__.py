"""Rewards, one per file.

What belongs here: built-in rewards, and rewards that combine, choose or call others. What does not: extraction and
comparison of final answers (`rlkit.ops.answers`), and workers and deadlines (`rlkit.rollout.scoring`).
"""

from rlkit.rewards.code import CodeReward
from rlkit.rewards.command import CommandReward
from rlkit.rewards.composite import Composite
from rlkit.rewards.episode import EpisodeReward
from rlkit.rewards.judge import JudgeReward
from rlkit.rewards.math import MathReward
from rlkit.rewards.model import ModelReward
from rlkit.rewards.overlong import Overlong
from rlkit.rewards.python import PythonReward
from rlkit.rewards.python_batch import BatchReward
from rlkit.rewards.qa import ExactReward, QAReward
from rlkit.rewards.remote import RemoteReward
from rlkit.rewards.router import Router
from rlkit.rewards.rubric import RubricReward

__all__ = [
    "BatchReward",
    "CodeReward",
    "CommandReward",
    "Composite",
    "EpisodeReward",
    "ExactReward",
    "JudgeReward",
    "MathReward",
    "ModelReward",
    "Overlong",
    "PythonReward",
    "QAReward",
    "RemoteReward",
    "Router",
    "RubricReward",
]

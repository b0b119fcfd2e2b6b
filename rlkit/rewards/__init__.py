"""Rewards, one per file.

What belongs here: built-in rewards, and rewards that combine, choose or call others. What does not: extraction and
comparison of final answers (`rlkit_math.answers`), and workers and deadlines (`rlkit.rollout.scoring`).
"""

from rlkit.registry.shelf import attribute_of
from rlkit.rewards.composite import Composite
from rlkit.rewards.episode import EpisodeReward
from rlkit.rewards.overlong import Overlong
from rlkit.rewards.python import PythonReward
from rlkit.rewards.python_batch import BatchReward
from rlkit.rewards.qa import ExactReward, QAReward
from rlkit.rewards.remote import RemoteReward
from rlkit.rewards.router import Router

__all__ = [
    "BatchReward",
    "Composite",
    "EpisodeReward",
    "ExactReward",
    "Overlong",
    "PythonReward",
    "QAReward",
    "RemoteReward",
    "Router",
]

__getattr__ = attribute_of("rewards")

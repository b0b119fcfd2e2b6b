"""Rewards of rewards, lengths, reference texts, a learned model and a service; users chosen by the row."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_rewards.composite import Composite
from rlkit_rewards.episode import EpisodeReward
from rlkit_rewards.interaction_router import InteractionRouter
from rlkit_rewards.model import ModelReward
from rlkit_rewards.overlong import Overlong
from rlkit_rewards.qa import ExactReward, QAReward
from rlkit_rewards.remote import RemoteReward
from rlkit_rewards.router import Router

__all__ = [
    "Composite", "EpisodeReward", "ExactReward", "InteractionRouter", "ModelReward", "Overlong", "QAReward",
    "RemoteReward", "Router",
]  # fmt: skip


@hookimpl
def rlkit_register(register: Register) -> None:
    for name in __all__:
        register(globals()[name])

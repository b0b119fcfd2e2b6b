"""Rewards that few recipes need: texts compared with references, a learned model, a service, one of several rewards."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_rewards.model import ModelReward
from rlkit_rewards.qa import ExactReward, QAReward
from rlkit_rewards.remote import RemoteReward
from rlkit_rewards.router import Router

__all__ = ["ExactReward", "ModelReward", "QAReward", "RemoteReward", "Router"]


@hookimpl
def rlkit_register(register: Register) -> None:
    for part in (ExactReward, ModelReward, QAReward, RemoteReward, Router):
        register(part)

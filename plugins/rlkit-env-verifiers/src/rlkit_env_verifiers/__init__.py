"""Environments of verifiers: tasks, rollouts and rewards."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_env_verifiers.agent import VerifiersAgent
from rlkit_env_verifiers.reward import VerifiersReward
from rlkit_env_verifiers.task import VerifiersTask

__all__ = ["VerifiersAgent", "VerifiersReward", "VerifiersTask"]


@hookimpl
def rlkit_register(register: Register) -> None:
    register(VerifiersAgent)
    register(VerifiersReward)
    register(VerifiersTask)

"""Critic, reference, reward model and teacher in pools of processes, each with devices of its own."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_placement.pools import StartedPools

__all__ = ["StartedPools"]


@hookimpl
def rlkit_register(register: Register) -> None:
    register(StartedPools)

"""Critic, reference, reward model and teacher in pools of processes, each with devices of its own."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_placement.pools import LocalPools

__all__ = ["LocalPools"]


@hookimpl
def rlkit_register(register: Register) -> None:
    register(LocalPools)

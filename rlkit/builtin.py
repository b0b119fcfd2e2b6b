"""rlkit's own parts, registered through the same hook as anybody's."""

from __future__ import annotations

from rlkit import (
    advantages,
    engines,
    filters,
    interactions,
    losses,
    optimizers,
    parsers,
    rewards,
    schedules,
    tasks,
    tools,
)
from rlkit.hooks import Register, hookimpl

PACKAGES = (
    advantages,
    engines,
    filters,
    interactions,
    losses,
    optimizers,
    parsers,
    rewards,
    schedules,
    tasks,
    tools,
)
"""Whose `__all__` names parts."""


@hookimpl
def rlkit_register(register: Register) -> None:
    for package in PACKAGES:
        for name in package.__all__:
            register(getattr(package, name))

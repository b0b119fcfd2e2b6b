"""rlkit's own parts, registered through the same hook as anybody's."""

from __future__ import annotations

from pathlib import Path

from rlkit import (
    advantages,
    engines,
    filters,
    interactions,
    loggers,
    losses,
    optimizers,
    parsers,
    rewards,
    schedules,
    tasks,
    tools,
)
from rlkit.hooks import Register, hookimpl

HERE = Path(__file__).parent
PACKAGES = (
    advantages,
    engines,
    filters,
    interactions,
    loggers,
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


@hookimpl
def rlkit_recipes() -> Path:
    """Return the folder of the shipped recipes: in the wheel, or beside the package in a checkout."""
    return HERE / "recipes" if (HERE / "recipes").is_dir() else HERE.parent / "recipes"

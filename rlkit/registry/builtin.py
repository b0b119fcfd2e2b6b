"""rlkit's own parts, registered through the same hook as those of plugins."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

from rlkit.hooks import Register, hookimpl, kinds_of
from rlkit.registry.shelf import shelf_parts

PACKAGE = Path(__file__).parents[1]
PACKAGES = (
    "advantages", "agents", "curricula", "engines", "filters", "interactions", "launchers", "loggers", "losses",
    "optimizers", "parsers", "rewards", "schedules", "tasks", "tools",
)  # fmt: skip
"""Packages whose `__all__` names parts."""


@hookimpl
def rlkit_register(register: Register) -> None:
    modules = [import_module(f"rlkit.{package}") for package in PACKAGES]
    parts: list[type] = [getattr(module, name) for module in modules for name in module.__all__]
    parts += [part for part in shelf_parts() if kinds_of(part)]
    for part in sorted(parts, key=lambda part: part.__name__):
        register(part)


@hookimpl
def rlkit_recipes() -> Path:
    """Return the folder of the shipped recipes: in the wheel, or beside the package in a checkout."""
    return PACKAGE / "recipes" if os.path.isdir(PACKAGE / "recipes") else PACKAGE.parent / "recipes"

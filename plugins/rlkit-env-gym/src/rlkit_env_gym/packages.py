"""The packages behind the parts, their supported versions, and hints for unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from rlkit.base.imports import require_package

SUPPORTED = {"gymnasium": ">=1.4,<2", "reasoning-gym": ">=0.1.25,<0.2"}
"""The versions that this plugin is made for, as its pyproject.toml states them."""


def require_supported(package: str) -> None:
    """Check the version of an installed package.

    Raises:
        UnavailableError: It is not installed.
        RecipeError: The version is not supported.
    """
    require_package(package, SUPPORTED[package], "rlkit-env-gym")


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return a hint with the nearest names, or with all of them."""
    ordered = sorted(names)
    near = difflib.get_close_matches(name, ordered, 3, 0.5) or [n for n in ordered if name and name in n][:3]
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    return f"known: {', '.join(ordered)}"

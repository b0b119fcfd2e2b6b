"""rlkit: post-training of language models with reinforcement learning, from plugins and recipes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlkit.api import Recipe, fit
    from rlkit.hooks import hookimpl
    from rlkit.tools import tool

__version__ = "0.1.0"
__all__ = ["Recipe", "__version__", "fit", "hookimpl", "tool"]

_HOMES = {"Recipe": "api", "fit": "api", "hookimpl": "hooks", "tool": "tools"}
"""Where names come from that are imported when they are asked for: `import rlkit` loads nothing."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"rlkit.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'rlkit' has no attribute {name!r}")

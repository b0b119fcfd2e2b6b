"""rlkit: post-training of language models with reinforcement learning, from plugins and recipes."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "hookimpl", "tool"]


def __getattr__(name: str) -> Any:
    if name == "hookimpl":
        from rlkit.hooks import hookimpl

        return hookimpl
    if name == "tool":
        from rlkit.tools.function import tool

        return tool
    raise AttributeError(f"module 'rlkit' has no attribute {name!r}")

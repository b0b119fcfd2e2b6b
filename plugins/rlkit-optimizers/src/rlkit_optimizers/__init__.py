"""Optimizers that few recipes need."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_optimizers.adamw_8bit import AdamW8bit

__all__ = ["AdamW8bit"]


@hookimpl
def rlkit_register(register: Register) -> None:
    register(AdamW8bit)

"""Optimizers and schedules that few recipes need."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_optimizers.adamw_8bit import AdamW8bit
from rlkit_optimizers.schedules import CosineRestarts, Polynomial, WarmupStableDecay

__all__ = ["AdamW8bit", "CosineRestarts", "Polynomial", "WarmupStableDecay"]


@hookimpl
def rlkit_register(register: Register) -> None:
    register(AdamW8bit)
    for schedule in (CosineRestarts, Polynomial, WarmupStableDecay):
        register(schedule)

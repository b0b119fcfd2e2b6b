"""Optimizers and schedules that few recipes need."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_optimizers.adamw_8bit import AdamW8bit
from rlkit_optimizers.muon import Muon
from rlkit_optimizers.schedules import CosineRestarts, Polynomial, WarmupStableDecay
from rlkit_optimizers.torch_optimizer import TorchOptimizer

__all__ = ["AdamW8bit", "CosineRestarts", "Muon", "Polynomial", "TorchOptimizer", "WarmupStableDecay"]


@hookimpl
def rlkit_register(register: Register) -> None:
    for part in (AdamW8bit, CosineRestarts, Muon, Polynomial, TorchOptimizer, WarmupStableDecay):
        register(part)

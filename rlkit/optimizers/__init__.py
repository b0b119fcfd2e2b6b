"""Optimizers."""

from rlkit.optimizers.adamw import AdamW
from rlkit.optimizers.muon import Muon
from rlkit.optimizers.torch_optimizer import TorchOptimizer

__all__ = ["AdamW", "Muon", "TorchOptimizer"]

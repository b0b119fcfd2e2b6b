"""Rollout engines: one a file."""

from rlkit.engines.torch_engine import TorchEngine

__all__ = ["TorchEngine"]

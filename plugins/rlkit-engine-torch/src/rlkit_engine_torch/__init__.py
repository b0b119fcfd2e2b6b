"""TorchEngine: samples with PyTorch in the trainer's process, on its weights.

What belongs here: batched decoding with a cache of keys and values, faster layers for it and for training, CUDA graphs
and samplers. What does not: servers and their processes (`rlkit_servers`), and the replay of recorded completions
(`rlkit.engines`).
"""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_engine_torch.engine import TorchEngine
from rlkit_engine_torch.layers import FusedLayers

__all__ = ["TorchEngine"]


@hookimpl
def rlkit_register(register: Register) -> None:
    register(TorchEngine)
    register(FusedLayers)

"""Rollout engines: one a file."""

from rlkit.engines.sglang.engine import SGLangEngine, SGLangServer
from rlkit.engines.torch.engine import TorchEngine

__all__ = ["SGLangEngine", "SGLangServer", "TorchEngine"]

"""Rollout engines: one a file."""

from rlkit.engines.sglang import SGLangEngine, SGLangServer
from rlkit.engines.torch_engine import TorchEngine

__all__ = ["SGLangEngine", "SGLangServer", "TorchEngine"]

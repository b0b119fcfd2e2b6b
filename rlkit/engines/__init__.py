"""Rollout engines: one a file."""

from rlkit.engines.sglang.engine import SGLangEngine, SGLangServer
from rlkit.engines.torch.engine import TorchEngine
from rlkit.engines.torch.recorded import Recorded

__all__ = ["Recorded", "SGLangEngine", "SGLangServer", "TorchEngine"]

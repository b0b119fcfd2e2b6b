"""The parts of this package, as a plugin has them."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_servers.sglang.engine import SGLangEngine, SGLangServer

__all__ = ["SGLangEngine", "SGLangServer"]


@hookimpl
def rlkit_register(register: Register) -> None:
    register(SGLangEngine)
    register(SGLangServer)

"""rlkit's TorchEngine in separate processes: other cores or GPUs sample, and a crash does not end the run."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_engine_http.engine import HttpApi, HttpEngine

__all__ = ["HttpApi", "HttpEngine"]


@hookimpl
def rlkit_register(register: Register) -> None:
    register(HttpEngine)

"""rlkit's TorchEngine in processes of their own: another core or GPU samples, and a crash costs no run."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_engine_http.engine import HttpApi, HttpEngine

__all__ = ["HttpApi", "HttpEngine"]


@hookimpl
def rlkit_register(register: Register) -> None:
    register(HttpEngine)

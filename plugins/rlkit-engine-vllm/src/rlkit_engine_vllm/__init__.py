"""Rollouts from vLLM servers, for rlkit."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_engine_vllm.api import VllmApi
from rlkit_engine_vllm.engine import VllmEngine, VllmServer
from rlkit_engine_vllm.launch import VllmLaunch

__all__ = ["VllmApi", "VllmEngine", "VllmLaunch", "VllmServer"]


@hookimpl
def rlkit_register(register: Register) -> None:
    register(VllmEngine)
    register(VllmServer)

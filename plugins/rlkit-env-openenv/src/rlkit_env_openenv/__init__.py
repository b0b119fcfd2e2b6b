"""Environments of OpenEnv servers."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_env_openenv.environment import OpenEnv
from rlkit_env_openenv.task import OpenEnvTask

__all__ = ["OpenEnv", "OpenEnvTask"]


@hookimpl
def rlkit_register(register: Register) -> None:
    register(OpenEnv)
    register(OpenEnvTask)

"""Ray places the processes of a run on the nodes of its cluster; ranks then find each other as torchrun's do."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_ray.launcher import Ray

__all__ = ["Ray"]


@hookimpl
def rlkit_register(register: Register) -> None:
    register(Ray)

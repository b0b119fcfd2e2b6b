"""The launcher of runs on clusters with SLURM."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_slurm.slurm import Slurm

__all__ = ["Slurm"]


@hookimpl
def rlkit_register(register: Register) -> None:
    register(Slurm)

"""Where the models beside the policy are: in the trainer's processes, or in pools of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlkit.base.names import Name
from rlkit.recipe.fabric import Fabric

Role = Literal["critic", "reference", "reward", "teacher"]
"""The roles of models beside the policy; `reward` is that of `ModelReward`."""


@dataclass
class Placement:
    """Models on devices of their own, in processes that the run starts and ends; other models stay in the trainer's.

    Args:
        roles: The pool of each role that is placed; roles of one pool share its processes.
        pools: The processes of each pool, as in `fabric:`, with a number of devices, or their indices. A number takes
            the next GPUs after those of the trainer and of earlier pools; with a launcher, devices of any node.
    """

    roles: dict[Name, Name]
    pools: dict[Name, Fabric]

    def roles_of(self, pool: str) -> list[str]:
        """Return the roles whose models are in a pool."""
        return [role for role, own_pool in self.roles.items() if own_pool == pool]

    def gpus(self) -> tuple[tuple[int, ...], ...]:
        """Return the GPUs of each process of each pool with a number of devices; 0 for a process on a CPU."""
        pools = self.pools.values()
        return tuple((int(x.accelerator != "cpu"),) * x.devices for x in pools if isinstance(x.devices, int))

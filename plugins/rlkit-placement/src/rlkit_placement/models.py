"""What a process computes with the models of a run that are placed in it (`placement:`), by the trainer's own code."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlkit.api.roles import (
    Meter,
    MiniBatch,
    Placer,
    begin_logps,
    begin_values,
    frozen_top,
    load_critic,
    load_teacher,
    set_learning_rate,
    update_critic,
)
from rlkit.distributed.fsdp2 import full_tensor
from rlkit.distributed.ranks import Ranks
from rlkit.interfaces.placement import PoolReply
from rlkit.models.activations import token_limit
from rlkit.models.checkpoints import load_checkpoint, tensor_shapes
from rlkit.models.reference import FrozenPolicy
from rlkit.models.store import Store
from rlkit.recipe import Recipe
from rlkit.types import Batch, Reads, TrainBatch

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from torch import Tensor


@dataclass(frozen=True)
class _Passes:
    """The recipe and the micro-batches of passes in a pool."""

    recipe: Recipe
    token_limit: int

    def at(self, temperature: float) -> _Passes:
        rollout = self.recipe.rollout
        sampling = replace(rollout.sampling, temperature=temperature)
        return replace(self, recipe=replace(self.recipe, rollout=replace(rollout, sampling=sampling)))


class RoleModels:
    """The models of some roles; all ranks of their pool must call its methods, in the same order.

    Args:
        recipe: From `placed_recipe`.
        fabric: Launched.
        roles: Those that have models here.
    """

    def __init__(self, recipe: Recipe, fabric: Fabric, roles: Collection[str]) -> None:
        self.ranks = Ranks(fabric)
        self._passes = _Passes(recipe, token_limit(recipe))
        placer = Placer(fabric, self.ranks)
        if "critic" in roles and recipe.critic is not None:
            self.critic = load_critic(recipe.critic, recipe, placer)
        self._frozen: dict[str | None, FrozenPolicy] = {}
        if "reference" in roles:
            self._frozen[None] = FrozenPolicy(recipe.model, placer.frozen, placer.empty)
        if "teacher" in roles and recipe.teacher is not None:
            for option, path in recipe.teacher.paths().items():
                if path not in self._frozen:
                    self._frozen[path] = load_teacher(recipe.teacher, option, recipe, placer)

    def values(self, batch: Batch) -> PoolReply:
        """Return the critic's values [B,T] f32."""
        return PoolReply({"values": begin_values(self._passes, self.critic, self.ranks, batch)()})

    def logps(self, batch: Batch, temperature: float, path: str | None = None) -> PoolReply:
        """Return the log-probs [B,T] f32 of the reference, or of the teacher of a path."""
        logps = begin_logps(self._passes.at(temperature), self._frozen[path], self.ranks, batch)()
        return PoolReply({"logps": logps})

    def top(self, batch: Batch, temperature: float, count: int, columns: int, path: str | None = None) -> PoolReply:
        """Return the ids [B,T,K] i64 and log-probs [B,T,K+1] f32 of the most likely tokens: see `frozen_top`."""
        reads = Reads(entropy=False, top=count, columns=columns)
        ids, logps = frozen_top(self._passes.at(temperature), self._frozen[path], self.ranks, batch, reads)
        return PoolReply({"ids": ids, "logps": logps})

    def update(self, batch: Batch, rate: float) -> PoolReply:
        """Make an optimizer step of the critic on rows with `values` and `returns`; return the sums of its metrics."""
        meter = Meter()
        set_learning_rate(self.critic.optimizer, rate)
        update_critic(
            self._passes, self.critic, self.ranks, MiniBatch(TrainBatch.of(batch), [*range(len(batch))]), meter
        )
        return PoolReply(sums=meter.take_sums())

    def state(self) -> PoolReply:
        """Return this rank's share of the critic's full tensors, by their names in checkpoints."""
        tensors = self.critic.tensors("critic", optimizer=self._passes.recipe.save.optimizer)
        share: dict[str, Tensor] = {}
        for number, name in enumerate(sorted(tensors)):  # agreed: parameters are the same on every rank
            tensor = full_tensor(tensors[name])
            if number % self.ranks.count == self.ranks.index:
                share[name] = tensor.cpu()
        return PoolReply(share)

    def load(self, location: str, name: str) -> PoolReply:
        """Load the critic from a checkpoint of a store.

        Raises:
            CheckpointError: The checkpoint is of another model.
        """
        store = Store(location)
        saved_names = tensor_shapes(store, name)
        load_checkpoint(store, name, self.critic.tensors("critic", saved_names, optimizer=True))
        return PoolReply()

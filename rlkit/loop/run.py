"""What a run holds once processes, devices and models exist; the parts see it as their `Runtime`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from lightning.fabric import Fabric
from torch import Tensor

from rlkit.loop.data import Data
from rlkit.loop.optim import make_optimizer
from rlkit.models.actor import Actor
from rlkit.models.load import load_policy, stop_ids
from rlkit.models.lora import base_model
from rlkit.models.reference import Reference
from rlkit.models.weights import PolicyWeights
from rlkit.recipe import Recipe
from rlkit.roles.reward import RewardManager
from rlkit.rollout.scoring import score
from rlkit.rollout.workers import Workers
from rlkit.types import Score, Trajectory

T = TypeVar("T")


class Run:
    """A recipe brought to life on this rank.

    Args:
        recipe: Checked by `rlkit.recipe.check`.
        data: From `load_data`.
        fabric: Launched.
        training: Whether there will be an optimizer; validation needs none.
    """

    def __init__(self, recipe: Recipe, data: Data, fabric: Fabric, training: bool = True) -> None:
        self.recipe = recipe
        self.data = data
        self.fabric = fabric
        self.version = 0
        self._runner = asyncio.Runner()
        self._runner.get_loop().set_exception_handler(_quiet_interrupts)
        self._workers = Workers(max(1, min(4, (os.cpu_count() or 1) // fabric.world_size)))
        self.actor = Actor(load_policy(recipe.model))
        self.module: Any = self.actor.to(fabric.device)
        self.optimizer: Any = None
        if training:
            self.module, self.optimizer = fabric.setup(self.actor, make_optimizer(self.actor, recipe.train))
        self.reference: Reference | None = None
        if training and recipe.kl_loss is not None:
            self.reference = Reference(self.actor, recipe.model, fabric.device)
        for part in (recipe.rollout.engine, recipe.reward, recipe.advantage):
            part.bind(self)

    @property
    def tokenizer(self) -> Any:
        return self.data.tokenizer

    @property
    def policy(self) -> Any:
        return base_model(self.actor.policy)

    @property
    def device(self) -> torch.device:
        return self.fabric.device

    @property
    def context(self) -> int:
        return self.data.context

    @property
    def stop_ids(self) -> frozenset[int]:
        return stop_ids(self.policy, self.tokenizer)

    def autocast(self) -> AbstractContextManager[None]:
        return self.fabric.autocast()

    def reduce(self, x: Tensor) -> Tensor:
        if self.fabric.world_size == 1:
            return x
        summed = self.fabric.all_reduce(x.to(self.device), reduce_op="sum")
        return summed.to(x.device)  # type: ignore[union-attr]

    def largest(self, value: float) -> float:
        """Give the largest of all ranks' values."""
        if self.fabric.world_size == 1:
            return value
        gathered = self.fabric.all_gather(torch.tensor(float(value), device=self.device))
        return float(gathered.max())  # type: ignore[union-attr]

    async def score(self, reward: RewardManager, trajectories: Sequence[Trajectory]) -> list[Score]:
        return await score(reward, trajectories, self._workers)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run asynchronous work on the run's event loop."""
        return self._runner.run(work)

    def publish(self) -> None:
        """Give the engine the weights, under the current version."""
        weights = PolicyWeights(self.actor.policy)
        self.wait(self.recipe.rollout.engine.sync(weights, self.version))

    def close(self) -> None:
        """Free what the run holds."""
        self.recipe.rollout.engine.close()
        self._workers.close()
        self._runner.close()


def _quiet_interrupts(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report what no task has handled, but for a Ctrl-C, which the run itself handles."""
    if not isinstance(context.get("exception"), KeyboardInterrupt):
        loop.default_exception_handler(context)

"""What a run offers its parts when they are bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlkit.distributed.fsdp2 import unsharded
from rlkit.interfaces.reward import RewardManager
from rlkit.interfaces.runtime import BoundPart, Runtime
from rlkit.models.lora import base_model
from rlkit.recipe import Recipe
from rlkit.registry import calling
from rlkit.rollout.service import RolloutService
from rlkit.train.data import Data
from rlkit.types import Score, Trajectory

T = TypeVar("T")


class PartRuntime:
    """The `Runtime` of a run's parts.

    Args:
        data: The tokenizer and what follows from it.
        rollouts: Of this rank.
    """

    def __init__(self, data: Data, rollouts: RolloutService) -> None:
        self._rollouts = rollouts
        self._actor, self._ranks = rollouts.actor, rollouts.ranks
        self.tokenizer = data.tokenizer
        self.context = data.context
        self.stop_ids = data.stop_ids

    @property
    def policy(self) -> Any:
        return base_model(self._actor.policy)

    @property
    def device(self) -> torch.device:
        return self._ranks.fabric.device

    @property
    def tensor_parallel(self) -> int:
        return self._ranks.tensor_parallel

    def unsharded(self) -> AbstractContextManager[None]:
        return unsharded(self._actor)

    def autocast(self) -> AbstractContextManager[None]:
        return self._ranks.fabric.autocast()

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        with self.autocast():
            return self._actor.logits(tokens)

    def gather_world(self, value: T) -> list[T]:
        return self._ranks.gather_world(value)

    def broadcast_tp(self, value: T) -> T:
        return self._ranks.broadcast_tp(value)

    def reduce(self, x: Tensor) -> Tensor:
        return self._ranks.all_reduce_sum(x)

    def gather(self, x: Tensor) -> Tensor:
        return self._ranks.gather(x)

    async def work(self, function: Callable[[T], object], argument: T, timeout: float) -> Any:
        return await self._rollouts.work(function, argument, timeout)

    async def score(self, reward: RewardManager, trajectories: Sequence[Trajectory]) -> list[Score]:
        return await self._rollouts.score(reward, trajectories)


def bind_parts(recipe: Recipe, data: Data, rollouts: RolloutService) -> None:
    """Bind all parts of a recipe, then the tools to the chat template.

    Raises:
        PartError: A part raised.
        RecipeError: The tools do not fit the model.
    """
    runtime: Runtime = PartRuntime(data, rollouts)
    for part in recipe.parts():
        if isinstance(part, BoundPart):
            with calling(part, "bind"):
                part.bind(runtime)
    data.bind_tools()

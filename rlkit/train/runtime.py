"""What a run offers its parts when they are bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import torch
from lightning.fabric import Fabric
from torch import Tensor

from rlkit.data.data import Data
from rlkit.distributed.fsdp2 import unsharded
from rlkit.interfaces.launcher import HostedServer, Launcher, ServerCommand
from rlkit.interfaces.placement import Pools
from rlkit.interfaces.reward import RewardManager
from rlkit.interfaces.runtime import OneProcess
from rlkit.models.config import context_length, load_config
from rlkit.models.load import load_tokenizer, stop_ids
from rlkit.models.lora import base_model
from rlkit.recipe import Recipe
from rlkit.registry import calling
from rlkit.rollout.scoring import score
from rlkit.rollout.service import RolloutService
from rlkit.rollout.template import ChatTemplate
from rlkit.rollout.workers import Workers
from rlkit.types import Score, Trajectory

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM, Tokenizer

R = TypeVar("R")
T = TypeVar("T")


class PartRuntime:
    """The `Runtime` of a run's parts.

    Args:
        data: The tokenizer and what follows from it.
        service: Samples and scores, on this rank.
        launcher: The launcher that has started this rank, if any.
        pools: Those of the recipe's `placement:`, if any.
    """

    def __init__(
        self, data: Data, service: RolloutService, launcher: Launcher | None = None, pools: Pools | None = None
    ) -> None:
        self._launcher = launcher
        self.placed_classifier = OneProcess().placed_classifier if pools is None else pools.classifier
        self._actor, self._ranks = service.actor, service.ranks
        self.tokenizer = data.dialogue.tokenizer
        self.context = data.dialogue.context
        self.stop_ids = data.dialogue.template.stop_ids
        self.tensor_parallel = self._ranks.tensor_parallel
        self.sequence_parallel = self._ranks.sequence_parallel
        self.autocast = self._ranks.fabric.autocast
        self.gather_world, self.broadcast_tp = self._ranks.gather_world, self._ranks.broadcast_tp
        self.reduce, self.gather = self._ranks.all_reduce_sum, self._ranks.gather
        self.work, self.score = service.work, service.score

    @property
    def policy(self) -> CausalLM:
        return base_model(self._actor.policy)

    @property
    def device(self) -> torch.device:
        return self._ranks.fabric.device

    def unsharded(self) -> AbstractContextManager[None]:
        return unsharded(self._actor)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        with self.autocast():
            return self._actor.logits(tokens)

    def host_server(self, command: ServerCommand) -> HostedServer | None:
        if self._launcher is None:
            return None
        with calling(self._launcher, "host_server"):
            return self._launcher.host_server(command)


class NoPolicyError(AttributeError):
    """A part asked for the policy where none is loaded."""


class RuntimeWithoutPolicy(OneProcess):
    """The `Runtime` of rewards and tools where there is no run: of one process, without a policy.

    The tokenizer is loaded on first use.

    Args:
        recipe: Checked.
        fabric: Of the recipe, not launched: its device and precision.
        workers: Where plain code runs.
    """

    def __init__(self, recipe: Recipe, fabric: Fabric, workers: Workers) -> None:
        self._recipe, self._fabric, self._workers = recipe, fabric, workers

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self._recipe.model)

    @cached_property
    def context(self) -> int:
        return context_length(load_config(self._recipe.model)) - self._recipe.rollout.engine.reserved

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        model = self._recipe.model
        files = stop_ids(model, self.tokenizer)
        return ChatTemplate(self.tokenizer, files, kwargs=model.chat_template_kwargs).stop_ids

    @property
    def device(self) -> torch.device:
        return self._fabric.device

    @property
    def policy(self) -> CausalLM:
        raise NoPolicyError("`runtime.policy`")

    def unsharded(self) -> AbstractContextManager[None]:
        raise NoPolicyError("`runtime.unsharded`")

    def autocast(self) -> AbstractContextManager[None]:
        return self._fabric.autocast()

    def logits(self, tokens: Tensor) -> Tensor:
        raise NoPolicyError("`runtime.logits`")

    async def work(self, function: Callable[[T], R], argument: T, timeout: float) -> R:
        return await self._workers.call(function, argument, timeout)

    async def score(self, reward: RewardManager, trajectories: Sequence[Trajectory]) -> list[Score]:
        return await score(reward, trajectories, self._workers)

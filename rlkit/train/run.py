"""What a run holds once processes, devices and models exist; the parts see it as their `Runtime`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from rlkit.distributed.fsdp2 import FSDP2, checkpoint_activations, make_fabric, unsharded
from rlkit.distributed.offload import HostOffload, free_cached
from rlkit.distributed.ranks import Ranks
from rlkit.interfaces.reward import RewardManager
from rlkit.models.actor import Actor
from rlkit.models.critic import ValueModel
from rlkit.models.ema import WeightAverage
from rlkit.models.load import load_backbone, load_policy
from rlkit.models.lora import base_model
from rlkit.models.reference import Reference
from rlkit.models.weights import PolicyWeights
from rlkit.recipe import Recipe
from rlkit.registry import calling
from rlkit.rollout.collect import BusyTimer, Sampler
from rlkit.rollout.conversation import Limits
from rlkit.rollout.scoring import score
from rlkit.rollout.template import ChatTemplate
from rlkit.rollout.workers import Workers
from rlkit.sections import Conversation, Critic, Train
from rlkit.train.data import Data
from rlkit.train.optim import make_optimizer
from rlkit.train.shaping import KLPenalty, RewardShaper
from rlkit.types import Sampling, Score, Trajectory

T = TypeVar("T")

WATCH_SECONDS = 0.5
"""Pauses in which a run looks whether its engine has lost its weights."""


def fabric_for(recipe: Recipe) -> Fabric:
    """Make the recipe's Fabric, in the environment that its engine asks for.

    Raises:
        RecipeError: The strategy is none that rlkit trains with.
    """
    for name, value in recipe.rollout.engine.environment.items():
        os.environ.setdefault(name, value)
    return make_fabric(recipe.fabric, recipe.train.deadline)


class TrainableModule(NamedTuple):
    """A module that learns, as Fabric wraps it, with its optimizer."""

    module: Any
    optimizer: Any
    max_grad_norm: float


class Run:
    """A recipe brought to life on this rank.

    Args:
        recipe: Checked by `rlkit.recipe.check`.
        data: From `load_data`.
        fabric: Launched.
        training: Whether there will be optimizers, a critic and a reference; validation needs none.
    """

    def __init__(self, recipe: Recipe, data: Data, fabric: Fabric, training: bool = True) -> None:
        self.recipe = recipe
        self.data = data
        self.fabric = fabric
        self.ranks = Ranks(fabric)
        self.version = 0
        self._awake = False
        self._runner = asyncio.Runner()
        self._runner.get_loop().set_exception_handler(_quiet_interrupts)
        CPUs = max(1, (os.cpu_count() or 1) // fabric.world_size)
        self._workers = Workers(recipe.reward.concurrency or min(4, CPUs))
        self._empty = isinstance(fabric.strategy, FSDP2) and fabric.global_rank > 0
        self.actor = Actor(load_policy(recipe.model, recipe.train.seed, self._empty, frozen=not training))
        if training:
            self._prepare_training()
        else:
            self._place(self.actor)
        for part in recipe.parts():
            with calling(part, "bind"):
                part.bind(self)
        data.bind_tools()
        self._resting = self._rest() if training and recipe.train.offload_during_rollout else None

    def _prepare_training(self) -> None:
        recipe = self.recipe
        train = recipe.train
        self.trained = self._set_up(self.actor, train)
        self.critic: TrainableModule | None = None
        if recipe.critic is not None:
            model = replace(recipe.model, path=recipe.critic.path or recipe.model.path, lora=recipe.critic.lora)
            self.value_model = ValueModel(load_backbone(model, train.seed, self._empty))
            self.critic = self._set_up(self.value_model, recipe.critic)
        self.reference = (
            Reference(self.actor, recipe.model, self._place, self._empty) if recipe.needs_reference else None
        )
        self.average = None if train.ema is None else WeightAverage(self.actor, train.ema)
        self.kl_penalty = None if recipe.kl_reward is None else KLPenalty(recipe.kl_reward)
        self.shaper = None if recipe.shaping is None else RewardShaper(recipe.shaping)

    def _rest(self) -> HostOffload:
        """Return what no rollout needs: optimizers, critic and reference; the policy too, if the engine has its own."""
        trained = [t for t in (self.trained, self.critic) if t is not None]
        modules: list[nn.Module] = [self.value_model] if self.critic is not None else []
        if self.reference is not None and not self.reference.shared:
            modules.append(self.reference.actor)
        if not self.recipe.rollout.engine.reads_policy:
            modules.append(self.actor)
        return HostOffload(modules, [t.optimizer.optimizer for t in trained], self.device)

    def _set_up(self, module: nn.Module, section: Train | Critic) -> TrainableModule:
        if self.recipe.train.checkpoint_activations:
            checkpoint_activations(module)
        wrapped = self.fabric.setup_module(module)
        self._call_once(module)
        optimizer = self.fabric.setup_optimizers(make_optimizer(module, section))
        return TrainableModule(wrapped, optimizer, section.max_grad_norm)

    def _place(self, module: nn.Module) -> None:
        """Put a module that does not learn on the device, sharded where the strategy shards."""
        if isinstance(self.fabric.strategy, FSDP2):
            self.fabric.setup_module(module)
            self._call_once(module)
        else:
            module.to(self.fabric.device)

    @torch.no_grad()
    def _call_once(self, module: nn.Module) -> None:
        """Let a sharded module find out that it is the root, before anybody calls what is inside."""
        if isinstance(self.fabric.strategy, FSDP2):
            if isinstance(module, Actor):  # the first rank's was loaded with its weights, and has been probed
                module.chunked = bool(self.ranks.all_reduce_max(module.chunked))
            tokens = torch.zeros(1, 2, dtype=torch.long, device=self.fabric.device)
            module(tokens, tokens.bool())

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
        return self.data.stop_ids

    def autocast(self) -> AbstractContextManager[None]:
        return self.fabric.autocast()

    @property
    def tensor_parallel(self) -> int:
        return self.ranks.tensor_parallel

    def unsharded(self) -> AbstractContextManager[None]:
        return unsharded(self.actor)

    def reduce(self, x: Tensor) -> Tensor:
        return self.ranks.all_reduce_sum(x)

    def gather(self, x: Tensor) -> Tensor:
        return self.ranks.gather(x)

    @property
    def template(self) -> ChatTemplate:
        """Renders conversations."""
        return self.data.template

    def sampler(
        self, sampling: Sampling, samples: int, step: int, *, attempt: int = 0, gauge: BusyTimer | None = None
    ) -> Sampler:
        """Return what the conversations of a step have in common."""
        recipe, conversation = self.recipe, self.recipe.conversation or Conversation()
        several = recipe.tools or recipe.interaction or recipe.environment
        return Sampler(
            recipe.rollout.engine,
            self.template,
            sampling,
            samples,
            recipe.train.seed,
            step,
            attempt,
            self.data.participants,
            Limits(conversation.turns if several else 1, conversation.tokens, conversation.tool_calls, self.context),
            conversation.seconds if several else None,
            conversation.check,
            gauge or BusyTimer(),
        )

    def sample(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work that asks the engine; all ranks must call this."""
        with self.awake():
            return self.wait(self._supplied(work))

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Keep the engine ready to sample; all ranks must enter this.

        What does not take part leaves the device first, where the recipe says so, and an engine that shares the
        device takes its memory after that. Work that samples several times enters this around all of it, so that
        such an engine is given the weights once.
        """
        if self._awake:
            yield
            return
        engine = self.recipe.rollout.engine
        with ExitStack() as stack:
            if self._resting is not None:
                stack.enter_context(self._resting.off_device())
            elif not engine.reads_policy:
                free_cached(self.device)
            if self.ranks.all_reduce_max(engine.needs_weights):
                self.wait(self._sync())
            stack.enter_context(engine.awake())
            stack.callback(setattr, self, "_awake", False)
            self._awake = True
            yield

    async def _supplied(self, work: Coroutine[Any, Any, T]) -> T:
        """Do work; if the engine of any rank loses its weights meanwhile, all ranks, each of which may hold a part of
        them, give them again once all are done with their work or wait for that."""
        engine, task = self.recipe.rollout.engine, asyncio.ensure_future(work)
        try:
            while True:
                while not (task.done() or engine.needs_weights):
                    await asyncio.wait((task,), timeout=WATCH_SECONDS)
                if task.done():
                    task.result()
                if not await self.ranks.any(engine.needs_weights):
                    return await task
                await self._sync()
        finally:
            task.cancel()

    def shard_for_rank(self, items: Sequence[T]) -> Sequence[T]:
        """Return the items that this rank samples: every n-th of them; none where another samples for it."""
        return items[self.ranks.index :: self.ranks.count] if self.ranks.lead else []

    async def work(self, function: Callable[[Any], Any], argument: Any, timeout: float) -> Any:
        return await self._workers.call(function, argument, timeout)

    async def score(self, reward: RewardManager, trajectories: Sequence[Trajectory]) -> list[Score]:
        return await score(reward, trajectories, self._workers)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run asynchronous work on the run's event loop."""
        return self._runner.run(work)

    def sync_weights(self) -> None:
        """Return the engine the weights, under the current version; all ranks must call this.

        One that must be given them before it samples anyway waits until then: its memory may be the trainer's now.
        """
        if not self.ranks.all_reduce_max(self.recipe.rollout.engine.needs_weights):
            self.wait(self._sync())

    async def _sync(self) -> None:
        with nullcontext() if self._resting is None else self._resting.back(self.actor):
            await self.recipe.rollout.engine.sync(PolicyWeights(self.actor.policy), self.version)

    def update_ema_and_reference(self, number: int) -> None:
        """After a step, let the averaged weights and the reference follow the policy."""
        if self.average is not None:
            self.average.update()
        section = self.recipe.reference
        if section is not None and self.reference is not None and number % section.refresh_every == 0:
            self.reference.update(self.actor, section.mix)

    def close(self) -> None:
        """Free what the run holds."""
        self.recipe.rollout.engine.close()
        self.data.participants.close()
        self._workers.close()
        # what is still on its way is cancelled, and nobody needs to hear of it
        self._runner.get_loop().set_exception_handler(lambda *_: None)
        self._runner.close()


def _quiet_interrupts(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report what no task has handled, but for a Ctrl-C, which the run itself handles."""
    if not isinstance(context.get("exception"), KeyboardInterrupt):
        loop.default_exception_handler(context)

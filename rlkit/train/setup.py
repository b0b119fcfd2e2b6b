"""Building what a run consists of from its recipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators import CUDAAccelerator  # type: ignore[attr-defined]

from rlkit.base.errors import RecipeError, RlkitError, UnavailableError, show
from rlkit.base.garbage import uncollected
from rlkit.base.text import part_name
from rlkit.data.data import Data
from rlkit.distributed.expert_parallel import expert_plan
from rlkit.distributed.fsdp2 import make_fabric
from rlkit.distributed.offload import use_device
from rlkit.distributed.ranks import Ranks
from rlkit.distributed.sequence import division_problem
from rlkit.distributed.tensor_parallel import plan_of
from rlkit.interfaces.engine import Capability
from rlkit.interfaces.launcher import is_launched
from rlkit.interfaces.placement import Pools
from rlkit.interfaces.runtime import BoundPart, Runtime
from rlkit.models.actor import ScoreModel
from rlkit.models.config import naming
from rlkit.models.size import find_config
from rlkit.recipe import FLASH, FSDP2, Model, Recipe
from rlkit.registry import calling
from rlkit.rollout.loop import EventLoop, close_on_loop
from rlkit.rollout.service import RolloutService
from rlkit.rollout.workers import Workers
from rlkit.train.callbacks import Callbacks
from rlkit.train.credit import RewardTransforms
from rlkit.train.models import Models, Placer, load_actor
from rlkit.train.replay import require_replay, start_replay
from rlkit.train.runtime import NoPolicyError, PartRuntime, RuntimeWithoutPolicy


@dataclass(frozen=True)
class TrainContext:
    """What a training run consists of on this rank.

    Args:
        recipe: Checked.
        data: The prompts.
        ranks: This rank among the others.
        models: What is trained, and what it is compared with.
        service: Samples from the policy and scores.
        transforms: What changes rewards on their way to the advantages.
        callbacks: What watches the run.
    """

    recipe: Recipe
    data: Data
    ranks: Ranks
    models: Models
    service: RolloutService
    transforms: RewardTransforms
    callbacks: Callbacks

    @property
    def device(self) -> torch.device:
        """Where tensors of this rank are."""
        return self.ranks.fabric.device


def fabric_for(recipe: Recipe) -> Fabric:
    """Make the recipe's Fabric, in the environment that its engine needs.

    Raises:
        RecipeError: The strategy is none that rlkit trains with, an option needs a GPU, the tokens of a model cannot
            be divided as `sequence_parallel` asks, or the model lacks the router of a mixture of experts.
    """
    for name, value in recipe.rollout.engine.environment.items():
        os.environ.setdefault(name, value)
    fabric = make_fabric(recipe.fabric, recipe.train.deadline, trains_bfloat16=recipe.trains_bfloat16)
    if recipe.model.attention in FLASH and not isinstance(fabric.accelerator, CUDAAccelerator):
        raise RecipeError(f"model.attention is {recipe.model.attention!r}, but there is no GPU; set it to sdpa")
    if recipe.train.offload_activations:
        require_device_memory(fabric)
    with suppress(UnavailableError):  # reported when the model is loaded
        require_router(recipe)
        require_replay(recipe)
        require_divisible(recipe)
    return fabric


def require_device_memory(fabric: Fabric) -> None:
    """Refuse to offload activations from a device whose memory is the host's.

    Raises:
        RecipeError: The device is no GPU.
    """
    if not isinstance(fabric.accelerator, CUDAAccelerator):
        raise RecipeError(
            "train.offload_activations moves activations from a GPU to host memory, but this run has no GPU; set it to "
            "false"
        )


def require_divisible(recipe: Recipe) -> None:
    """Refuse parallelism for models whose matrices or tokens cannot be divided, by their configurations.

    Raises:
        RecipeError: A model is such, or its configuration is malformed; UnavailableError if the hub has none now.
    """
    strategy, model, critic, teacher = recipe.fabric.strategy, recipe.model, recipe.critic, recipe.teacher
    if not isinstance(strategy, FSDP2):
        return
    if strategy.tensor_parallel == strategy.sequence_parallel == strategy.expert_parallel == 1:
        return
    models = {"model.path": model}
    if critic is not None and critic.path is not None:
        models["critic.path"] = replace(model, path=critic.path, lora=critic.lora)
    if teacher is not None and teacher.urls is None:
        models |= {option: replace(model, path=path, lora=None) for option, path in teacher.paths().items()}
    for option, loaded in models.items():
        with naming(option):
            config = find_config(loaded)
            if strategy.tensor_parallel > 1:
                plan_of(config, strategy.tensor_parallel)
            has_plan = strategy.expert_parallel == 1 or expert_plan(config, strategy.expert_parallel)
        if not has_plan and option == "model.path":
            raise RecipeError(
                f"fabric.strategy has expert_parallel={strategy.expert_parallel}, but transformers has no plan for "
                f"experts of model.path {show(str(model.path))}, a {config.model_type!r}; set expert_parallel: 1"
            )
        problem = division_problem(config) if strategy.sequence_parallel > 1 else None
        if problem is not None:
            raise RecipeError(
                f"fabric.strategy has sequence_parallel={strategy.sequence_parallel}, but the tokens of {option} "
                f"{show(str(loaded.path))} cannot be divided: {problem}"
            )


def require_router(recipe: Recipe) -> None:
    """Refuse the router's loss for models without a router, by the configuration.

    Raises:
        RecipeError: The model has none, or its configuration is malformed; UnavailableError if the hub has none now.
    """
    coef = recipe.train.router_aux_loss_coef
    if not coef:
        return
    config = find_config(recipe.model)
    if not hasattr(config.get_text_config(), "router_aux_loss_coef"):
        raise RecipeError(
            f"train.router_aux_loss_coef is {coef}, but model.path {show(recipe.model.path)} is of type "
            f"{config.model_type}, which has no router with such a loss; set it to 0"
        )


@uncollected()
def prepare_training(
    recipe: Recipe,
    data: Data,
    fabric: Fabric,
    note: Callable[[str], None] = print,
    pools: Pools | None = None,
    *,
    initial: Model | None = None,
) -> TrainContext:
    """Load and place all models and bind the parts.

    Args:
        recipe: Checked by `rlkit.recipe.check`.
        data: From `load_data`.
        fabric: Launched.
        note: Shows a warning.
        pools: Have the models that the recipe places; without them, those are loaded here.
        initial: The policy with which the run began; None if it is the recipe's.
    """
    ranks = Ranks(fabric)
    models = Models(recipe, Placer(fabric, ranks), pools, initial)
    for text in models.padding_notes():
        note(text)
    start_replay(recipe, models.actor, note)
    offload = None
    if recipe.train.offload_during_rollout:
        reads_policy = Capability.READS_POLICY in recipe.rollout.engine.capabilities
        offload = models.offload(fabric.device, keep_policy=reads_policy)
    service = RolloutService(recipe, data.dialogue, models.actor, ranks, offload, note=note)
    _bind(recipe, data, service, pools)
    transforms = RewardTransforms(recipe.shaping, recipe.kl_reward)
    return TrainContext(recipe, data, ranks, models, service, transforms, Callbacks(recipe.callbacks, ranks, note))


@uncollected()
def prepare_rollouts(recipe: Recipe, data: Data, fabric: Fabric) -> RolloutService:
    """Load and place the policy alone and bind the parts: for validation and generation.

    Args:
        recipe: Checked by `rlkit.recipe.check`.
        data: From `load_data`.
        fabric: Launched.
    """
    ranks = Ranks(fabric)
    service = RolloutService(recipe, data.dialogue, load_actor(recipe, Placer(fabric, ranks)), ranks)
    _bind(recipe, data, service)
    return service


def _bind(recipe: Recipe, data: Data, service: RolloutService, pools: Pools | None = None) -> None:
    """Bind all parts, then the tools to the chat template, as which a reward model scores conversations.

    If a part raises, the service is closed; its error hides those of parts that are closed unbound.

    Raises:
        PartError: A part raised.
        RecipeError: The tools do not fit the model.
    """
    try:
        runtime: Runtime = PartRuntime(data, service, recipe.launcher if is_launched() else None, pools)
        for part in recipe.parts():
            if isinstance(part, BoundPart):
                with calling(part, "bind"):
                    part.bind(runtime)
        data.bind_tools()
        data.dialogue.participants.note = service.note
        if isinstance(service.actor, ScoreModel):
            service.actor.close_with(data.dialogue.template.closing(), data.dialogue.template.stop_ids)
    except BaseException as error:
        try:
            service.close()
        except RlkitError as unbound:
            raise error from unbound
        raise


@dataclass(frozen=True)
class Bound:
    """What parts are bound to, and the event loop that they run on."""

    runtime: RuntimeWithoutPolicy
    loop: EventLoop


@contextmanager
def bound_without_policy(recipe: Recipe, *used: BoundPart) -> Iterator[Bound]:
    """Bind parts of a recipe, and close them at the end.

    Raises:
        RecipeError: One needs the policy as soon as it is bound.
        PartError: One raised.
    """
    fabric = fabric_for(recipe)
    with ExitStack() as stack:
        loop = EventLoop(partial(use_device, fabric.device))
        stack.callback(loop.close)
        workers = Workers(recipe.concurrency or min(4, os.cpu_count() or 1))
        stack.callback(workers.close)
        stack.callback(lambda: loop.run(close_on_loop(used)))
        runtime = RuntimeWithoutPolicy(recipe, fabric, workers)
        for part in used:
            try:
                with calling(part, "bind"):
                    part.bind(runtime)
            except NoPolicyError as error:
                raise RecipeError(
                    f"{part_name(part)} asks for {error}, the policy of a run, which is not loaded here; choose another"
                ) from error
        yield Bound(runtime, loop)

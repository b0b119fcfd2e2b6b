"""What can be known of a run before it: batch sizes and lengths, a trial of the reward, the memory of a step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rlkit.base.errors import UnavailableError
from rlkit.data.data import Data
from rlkit.distributed.fsdp2 import make_fabric
from rlkit.interfaces.reward import RewardManager
from rlkit.recipe import Recipe
from rlkit.rollout.workers import Workers
from rlkit.run.preflight import plan
from rlkit.run.preflight.adapter_check import check_adapters
from rlkit.run.preflight.dryrun import dry_run
from rlkit.run.preflight.plan import Trial, require_reward
from rlkit.train.runtime import NoPolicyError, RuntimeWithoutPolicy
from rlkit.train.setup import prepare_training, require_divisible

if TYPE_CHECKING:
    from lightning.fabric import Fabric

__all__ = [
    "Trial", "check_adapters", "describe_batches", "describe_run", "fabric_elsewhere", "measure_step", "require_reward",
    "try_reward",
]  # fmt: skip


def describe_run(data: Data, ranks: int, on_gpu: bool) -> Iterator[str]:
    """Yield batch sizes, lengths, warnings about the recipe, and the share of the weights that adapters reach.

    Raises:
        RecipeError: The adapters cannot be used.
    """
    yield from plan.lines(data, ranks, on_gpu)
    yield from plan.large_model(data.recipe, on_gpu)
    yield from check_adapters(data.recipe.model)


def describe_batches(recipe: Recipe, rows: int | None, ranks: int, on_gpu: bool) -> Iterator[str]:
    """Yield batch sizes and warnings about a recipe, of whose data at most the number of training rows is known."""
    yield from plan.batches(recipe, rows, ranks, on_gpu)
    yield from plan.large_model(recipe, on_gpu)


def fabric_elsewhere(recipe: Recipe) -> Fabric:
    """Return a Fabric on this machine's CPU for as many ranks as the recipe has, to plan for another machine.

    Raises:
        RecipeError: A model cannot be divided among the ranks.
    """
    section = recipe.fabric
    devices = len(section.devices) if isinstance(section.devices, list) else section.devices
    elsewhere = replace(section, accelerator="cpu", devices=1 if devices == "auto" else devices)
    with suppress(UnavailableError):  # reported when the model is loaded
        require_divisible(recipe)
    return make_fabric(elsewhere, recipe.train.deadline)


def try_reward(data: Data, reward: RewardManager, fabric: Fabric) -> Trial | str:
    """Score the reference answers of some prompts and wrong ones, without the policy.

    Args:
        data: The prompts.
        reward: A recipe's `trial_reward`.
        fabric: Of the recipe, not launched.

    Returns:
        The trial; or why the reward was not tried, after "it": it does more than compute, or needs the policy.
    """
    effect = next(filter(None, (part.effect() for part in plan.simple_rewards(reward))), None)
    if effect is not None:
        return effect
    workers = Workers(1)
    try:
        runtime = RuntimeWithoutPolicy(data.recipe, fabric, workers)
        reward.bind(runtime)
        prompts, structure = data.examples(plan.TRIED_ROWS), data.recipe.rollout.sampling.structure
        return asyncio.run(plan.try_reward(partial(runtime.score, reward), prompts, structure))
    except NoPolicyError as error:
        return f"asks for {error}"
    finally:
        workers.close()


def measure_step(data: Data, fabric: Fabric) -> tuple[Trial | None, dict[str, float]]:
    """Load the models, try the reward, and make a step on the longest rows that changes nothing.

    Args:
        data: The prompts.
        fabric: Launched; all ranks must call this.

    Returns:
        The trial; None without a reward to try.
        The peak memory in MiB after each phase.
    """
    context, reward, trial = prepare_training(data.recipe, data, fabric), data.recipe.trial_reward, None
    try:
        if reward is not None:
            trial = plan.try_in_run(context.service, data, reward)
        return trial, dry_run(context)
    finally:
        context.service.close()

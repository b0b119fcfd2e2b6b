"""Building what a run consists of from its recipe."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators import CUDAAccelerator  # type: ignore[attr-defined]

from rlkit.base.errors import RecipeError
from rlkit.base.garbage import uncollected
from rlkit.data.data import Data
from rlkit.distributed.fsdp2 import make_fabric
from rlkit.distributed.ranks import Ranks
from rlkit.models.actor import Actor, ScoreModel
from rlkit.recipe import FLASH, Recipe
from rlkit.rollout.service import RolloutService
from rlkit.train.callbacks import Callbacks
from rlkit.train.credit import RewardTransforms
from rlkit.train.models import Models, Placer, load_actor
from rlkit.train.runtime import bind_parts


@dataclass(frozen=True)
class TrainContext:
    """What a training run consists of on this rank.

    Args:
        recipe: Checked.
        data: The prompts.
        ranks: This rank among the others.
        models: What is trained, and what it is compared with.
        rollouts: Samples from the policy and scores.
        transforms: What changes rewards on their way to the advantages.
        callbacks: What watches the run.
    """

    recipe: Recipe
    data: Data
    ranks: Ranks
    models: Models
    rollouts: RolloutService
    transforms: RewardTransforms
    callbacks: Callbacks

    @property
    def device(self) -> torch.device:
        """Where tensors of this rank are."""
        return self.ranks.fabric.device


def fabric_for(recipe: Recipe) -> Fabric:
    """Make the recipe's Fabric, in the environment that its engine needs.

    Raises:
        RecipeError: The strategy is none that rlkit trains with, or the model's attention needs a GPU.
    """
    for name, value in recipe.rollout.engine.environment.items():
        os.environ.setdefault(name, value)
    fabric = make_fabric(recipe.fabric, recipe.train.deadline)
    if recipe.model.attention in FLASH and not isinstance(fabric.accelerator, CUDAAccelerator):
        raise RecipeError(
            f"model.attention is {recipe.model.attention!r}, which needs a GPU, but there is none; set it to sdpa"
        )
    return fabric


@uncollected()
def prepare_training(recipe: Recipe, data: Data, fabric: Fabric, note: Callable[[str], None] = print) -> TrainContext:
    """Load and place all models and bind the parts.

    Args:
        recipe: Checked by `rlkit.recipe.check`.
        data: From `load_data`.
        fabric: Launched.
        note: Shows a warning.
    """
    ranks = Ranks(fabric)
    models = Models(recipe, Placer(fabric, ranks))
    for text in models.padding_notes():
        note(text)
    _close_rows(models.actor, data)
    offload = None
    if recipe.train.offload_during_rollout:
        offload = models.offload(fabric.device, keep_policy=recipe.rollout.engine.reads_policy)
    rollouts = RolloutService(recipe, data.dialogue, models.actor, ranks, offload)
    bind_parts(recipe, data, rollouts)
    transforms = RewardTransforms(recipe.shaping, recipe.kl_reward)
    return TrainContext(recipe, data, ranks, models, rollouts, transforms, Callbacks(recipe.callbacks, ranks, note))


@uncollected()
def prepare_rollouts(recipe: Recipe, data: Data, fabric: Fabric) -> RolloutService:
    """Load and place the policy alone and bind the parts: for validation and generation.

    Args:
        recipe: Checked by `rlkit.recipe.check`.
        data: From `load_data`.
        fabric: Launched.
    """
    ranks = Ranks(fabric)
    actor = load_actor(recipe, Placer(fabric, ranks))
    _close_rows(actor, data)
    rollouts = RolloutService(recipe, data.dialogue, actor, ranks)
    bind_parts(recipe, data, rollouts)
    return rollouts


def _close_rows(actor: Actor, data: Data) -> None:
    """Let a reward model score conversations as the chat template renders them."""
    if isinstance(actor, ScoreModel):
        actor.close_with(data.dialogue.template.closing(), data.dialogue.stop_ids)

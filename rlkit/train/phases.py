"""The phases of a step that all ways to train share, from rewards to the engine's new weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from lightning.fabric import Fabric

from rlkit.data.data import Data
from rlkit.distributed.ranks import Ranks
from rlkit.interfaces.advantage import Needs
from rlkit.interfaces.callback import TrainingBatch
from rlkit.interfaces.loss import Inputs
from rlkit.interfaces.placement import PlacedModel
from rlkit.models.flops import peak_flops
from rlkit.recipe import Recipe
from rlkit.rollout.service import RolloutService
from rlkit.train.callbacks import Callbacks
from rlkit.train.credit import (
    RewardTransforms,
    attach_reference_rewards,
    attach_roles,
    correct,
    distill,
    estimate,
    estimate_by_rollout,
    mask_truncated,
)
from rlkit.train.metrics import Meter, describe_advantages, describe_rewards
from rlkit.train.models import Models
from rlkit.train.optim import learning_rate, set_learning_rate
from rlkit.train.rollouts import Rollouts
from rlkit.train.teacher import log_by_teacher
from rlkit.train.update import update_models
from rlkit.types import Batch, TrainBatch, Trajectory

PHASES = ("sample", "logps", "score", "update", "sync")
"""The phases whose seconds are logged as `time/PHASE`."""


class StepResult(NamedTuple):
    """The outcome of a step.

    Args:
        rollouts: All trajectories of the step on this rank.
        batch: The batch that was trained on.
        metrics: Metrics over all ranks, by name.
    """

    rollouts: Rollouts
    batch: TrainBatch
    metrics: dict[str, float]


def shape_rewards(recipe: Recipe, transforms: RewardTransforms, ranks: Ranks, batch: Batch, meter: Meter) -> None:
    """Correct for the engine's mismatch, shape the rewards, and subtract the KL penalty.

    With log-linear old log-probs, the weights of a correction are known in the update only.
    """
    correction = None if recipe.train.old_logps == "loglinear" else recipe.correction
    reduce = ranks.all_reduce_sum
    metrics = correct(batch, correction, recipe.rejection, reduce) | transforms.apply(batch, reduce)
    for name, value in metrics.items():
        meter.max(name, value)


def compute_advantages(
    recipe: Recipe, ranks: Ranks, batch: Batch, trajectories: list[Trajectory], meter: Meter
) -> None:
    """Fill the advantages by the recipe's estimator, add the teacher's share, and log both.

    Args:
        recipe: The recipe of the run.
        ranks: This rank among the others.
        batch: The scored rows of this rank.
        trajectories: The trajectories of these rows.
        meter: Takes the metrics.
    """
    if Needs.REFERENCE_REWARDS in recipe.needs:
        attach_reference_rewards(trajectories, batch)
    if Needs.ROLES in recipe.needs:  # agreed: from the recipe
        attach_roles(trajectories, batch, ranks)
    if batch.main is None and batch.peers is None:
        estimate(recipe.advantage, batch, has_critic=recipe.critic is not None)
    else:
        estimate_by_rollout(recipe.advantage, batch)
    if recipe.train.mask_truncated:
        mask_truncated(batch, trajectories)
    for name, value in batch.metrics.items():
        meter.mean(f"advantage/{name}", value, weight=len(batch))
    if recipe.teacher is not None:
        for name, value in distill(batch, recipe.teacher.coef, ranks.all_reduce_sum).items():
            meter.max(name, value)
        log_by_teacher(recipe.teacher, batch, trajectories, meter)


def learn(
    data: Data,
    models: Models,
    service: RolloutService,
    scored: TrainingBatch,
    meter: Meter,
    *,
    callbacks: Callbacks,
) -> TrainBatch:
    """Update the models by a step's batch and send the new weights to the engine; return the batch.

    Args:
        data: Holds the recipe and the mixtures.
        models: To update.
        service: Whose engine takes the weights.
        scored: The step's number and its rows, with advantages.
        meter: Takes the metrics.
        callbacks: See the batch first, and multiply the learning rates.
    """
    recipe, number = data.recipe, scored.step
    callbacks.emit("on_batch", scored)
    set_learning_rates(recipe, models, number, callbacks.lr_factor(), meter)
    with meter.timed("update"):
        batch = update_models(data, models, service, scored, meter)
        models.update_ema_and_reference(number)
    if models.pools is not None:
        for name, share in models.pools.idle().items():
            meter.mean(f"placement/{name}/idle", share)
    with meter.timed("sync"):
        service.version += 1
        service.sync_weights()
    if Inputs.REWARDS in recipe.loss.inputs:
        describe_rewards(batch, meter)
    if Inputs.ADVANTAGES in recipe.loss.inputs:
        describe_advantages(batch, meter)
    return batch


def set_learning_rates(recipe: Recipe, models: Models, number: int, factor: float, meter: Meter) -> None:
    """Set the learning rates of a step; callbacks multiply them by a factor."""
    train, critic = recipe.train, recipe.critic
    for name, trained, section in (("lr", models.policy, train), ("critic/lr", models.critic, critic)):
        if trained is not None and section is not None:
            rate = factor * learning_rate(section, number, train.total_steps)
            if isinstance(trained, PlacedModel):
                trained.rate = rate
            else:
                set_learning_rate(trained.optimizer, rate)
            meter.max(name, rate)


def finish_step(
    service: RolloutService, rollouts: Rollouts, batch: TrainBatch, meter: Meter, tokens_of: Mapping[str, str]
) -> StepResult:
    """Return a step's result, with its metrics over all ranks.

    Args:
        service: Whose engine sampled.
        rollouts: Those of the step.
        batch: The batch that was trained on.
        meter: The meter of the step.
        tokens_of: The metric with the number of tokens of each further phase whose speed is logged.
    """
    meter.max("version", service.version)
    for name, gauge in service.engine.health().items():
        meter.max(f"engine/{name}", gauge)
    metrics = meter.result(service.ranks)
    return StepResult(rollouts, batch, metrics | speeds(service.recipe, service.ranks.fabric, metrics, tokens_of))


def speeds(recipe: Recipe, fabric: Fabric, metrics: dict[str, float], tokens_of: Mapping[str, str]) -> dict[str, float]:
    """Return rates of a step from its seconds; `time/mfu` is the share of the device's peak that the update reached."""
    seconds = sum(metrics.get(f"time/{phase}", 0.0) for phase in PHASES)
    rates = {
        "time/trainer_idle_share": (metrics["time/sample"] + metrics["time/score"]) / max(seconds, 1e-9),
        "time/tokens_per_second_per_device": metrics["update/tokens"] / max(seconds, 1e-9) / fabric.world_size,
    }
    if "sample" in tokens_of:
        rates["time/tokens_per_second"] = metrics.get("rollout/tokens", 0.0) / max(metrics["time/sample"], 1e-9)
    for phase, tokens in {"logps": "update/tokens", "update": "update/tokens", **tokens_of}.items():
        if f"time/{phase}" in metrics and metrics.get(tokens):
            rates[f"time/{phase}_ms_per_token"] = 1000 * metrics[f"time/{phase}"] / metrics[tokens]
    if "update/tflop" in metrics:
        reached = metrics["update/tflop"] / max(metrics["time/update"], 1e-9) / fabric.world_size
        rates["time/tflops_per_device"] = reached
        half = "bf16" in recipe.fabric.precision or (recipe.model.lora is not None and "bf" in recipe.model.dtype)
        device_name = torch.cuda.get_device_name(fabric.device) if fabric.device.type == "cuda" else ""
        peak = peak_flops(device_name, half)
        if peak is not None:
            rates["time/mfu"] = reached * 1e12 / peak
    return rates

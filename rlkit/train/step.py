"""A step: sample, compute log-probs while rewards are scored, estimate advantages, update, sync the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from rlkit.interfaces.callback import RolloutsEnd, TrainingBatch
from rlkit.interfaces.loss import Inputs
from rlkit.models.flops import peak_flops
from rlkit.ops.groups import group_stats
from rlkit.ops.masked import masked_mean
from rlkit.rollout.collate import add_rewards, collate
from rlkit.rollout.service import RolloutService
from rlkit.train.credit import attach_advantages, attach_first_pass, correct, distill, estimate
from rlkit.train.data import Data
from rlkit.train.distill.logps import compute_teacher_logps, log_by_teacher
from rlkit.train.logps import compute_logps, measure_gap
from rlkit.train.metrics import Meter
from rlkit.train.optim import learning_rate, set_learning_rate
from rlkit.train.rollouts import Rollouts, await_scores, record_outcome, sample
from rlkit.train.setup import TrainContext
from rlkit.train.update import update_models
from rlkit.types import Batch, TrainBatch

Obtain = Callable[[Data, RolloutService, int, Meter], Rollouts]
"""Returns a step's rollouts, given its number, and logs their metrics; all ranks call it."""


class StepResult(NamedTuple):
    """The outcome of a step: its rollouts, the batch that was trained on, and metrics."""

    rollouts: Rollouts
    batch: TrainBatch
    metrics: dict[str, float]


def step(context: TrainContext, number: int, obtain: Obtain = sample) -> StepResult:
    """Run one training step; the first is 1.

    Args:
        context: The run's.
        number: The step's.
        obtain: Returns the step's rollouts.
    """
    meter = Meter()
    with _timed(meter, "sample"):
        rollouts = obtain(context.data, context.rollouts, number, meter)
    context.callbacks.emit("on_rollouts", RolloutsEnd(number, rollouts.all))
    sampled = collate(rollouts.train_on).to(context.device)
    with _timed(meter, "logps"):
        compute_logps(context, sampled)
        if context.recipe.teacher is not None:  # agreed: an option of the recipe
            compute_teacher_logps(context, sampled, rollouts.train_on)
    with _timed(meter, "score"):
        places = await_scores(context.rollouts, rollouts, meter)
        record_outcome(context.data, context.rollouts, rollouts, meter)
    kept = [rollouts.train_on[i] for i in places]
    scored = add_rewards(sampled.rows(torch.tensor(places, dtype=torch.long, device=context.device)), kept)
    if rollouts.greedy is not None:
        scored.greedy_rewards = torch.tensor([rollouts.greedy[t.group] for t in kept], device=context.device)
        for trajectory in kept:
            trajectory.credit["greedy_reward"] = rollouts.greedy[trajectory.group]
    shape_rewards(context, scored, meter)
    estimate(context.recipe.advantage, scored, has_critic=context.recipe.critic is not None)
    for name, value in scored.metrics.items():
        meter.mean(f"advantage/{name}", value, weight=len(scored))
    if (section := context.recipe.teacher) is not None:  # agreed: an option of the recipe
        for name, value in distill(scored, section.coef, context.ranks.all_reduce_sum).items():
            meter.max(name, value)
        log_by_teacher(section, scored, kept, meter)
    if Inputs.ADVANTAGES in context.recipe.loss.inputs:
        attach_advantages(kept, scored)
    context.callbacks.emit("on_batch", TrainingBatch(number, scored))
    schedule(context, number, meter)
    with _timed(meter, "update"):
        batch = update_models(context, scored, number, meter)
        context.models.update_ema_and_reference(number)
    if (every := context.recipe.log.rollouts.every) and number % every == 0:
        attach_first_pass(kept, batch)
    with _timed(meter, "sync"):
        context.rollouts.version += 1
        context.rollouts.sync_weights()
    if Inputs.REWARDS in context.recipe.loss.inputs:
        describe_rewards(batch, meter)
    if Inputs.ADVANTAGES in context.recipe.loss.inputs:
        describe_advantages(batch, meter)
    if not context.rollouts.engine.recorded:  # agreed: an option of the recipe
        measure_gap(batch, context.rollouts.version - 1, context.ranks.all_reduce_sum, meter)
    meter.max("version", context.rollouts.version)
    for name, gauge in (context.rollouts.engine.health() if context.recipe.generates else {}).items():
        meter.max(f"engine/{name}", gauge)
    metrics = meter.result(context.ranks)
    return StepResult(rollouts, batch, metrics | speeds(context, metrics))


def schedule(context: TrainContext, number: int, meter: Meter) -> None:
    """Set the step's learning rates."""
    train, critic, models = context.recipe.train, context.recipe.critic, context.models
    factor = context.callbacks.lr_factor()
    for name, trained, section in (("lr", models.policy, train), ("critic/lr", models.critic, critic)):
        if trained is not None and section is not None:
            rate = factor * learning_rate(section, number, train.steps)
            set_learning_rate(trained.optimizer, rate)
            meter.max(name, rate)


def shape_rewards(context: TrainContext, batch: Batch, meter: Meter) -> None:
    """Correct for the engine's mismatch, shape the rewards, and take KL off them.

    With log-linear old log-probs, the weights of a correction are known in the update only.
    """
    recipe, reduce = context.recipe, context.ranks.all_reduce_sum
    weigh = None if recipe.train.old_logps == "loglinear" else recipe.correction
    metrics = correct(batch, weigh, recipe.rejection, reduce) | context.transforms.apply(batch, reduce)
    for name, value in metrics.items():
        meter.max(name, value)


def describe_rewards(batch: TrainBatch, meter: Meter) -> None:
    """Log the spread of rewards in groups."""
    stats = group_stats(batch.rewards, batch.group)
    meter.means("reward/std", stats.std.tolist())
    meter.means("groups/no_signal", stats.equal[stats.size > 1].float().tolist())


def describe_advantages(batch: TrainBatch, meter: Meter) -> None:
    """Log the advantages and the critic's fit."""
    meter.count("advantage/not_finite", float((~batch.advantages.isfinite() & batch.mask).sum()))
    if len(batch):
        meter.max("advantage/max", batch.advantages.max())
        meter.max("advantage/abs_mean", masked_mean(batch.advantages.abs(), batch.mask))
    if batch.values is not None and batch.returns is not None and int(batch.mask.sum()) > 1:
        meter.mean("critic/explained_variance", explained_variance(batch.values[batch.mask], batch.returns[batch.mask]))


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """Return 1 - var(returns - values) / (var(returns) + 1e-5) of [N] tokens."""
    return 1 - (returns - values).var() / (returns.var() + 1e-5)


def speeds(context: TrainContext, metrics: dict[str, float]) -> dict[str, float]:
    """Return what a second of a step yielded; `time/mfu` is the share of the device's peak that the update reached."""
    recipe, fabric = context.recipe, context.ranks.fabric
    seconds = sum(metrics.get(f"time/{phase}", 0.0) for phase in ("sample", "logps", "score", "update", "sync"))
    found = {
        "time/trainer_idle_share": (metrics["time/sample"] + metrics["time/score"]) / max(seconds, 1e-9),
        "time/tokens_per_second_per_device": metrics["update/tokens"] / max(seconds, 1e-9) / fabric.world_size,
    }
    phases = {"logps": "update/tokens", "update": "update/tokens"}
    if not recipe.rollout.engine.recorded:
        found["time/tokens_per_second"] = metrics.get("rollout/tokens", 0.0) / max(metrics["time/sample"], 1e-9)
        phases["sample"] = "rollout/tokens"
    for phase, tokens in phases.items():
        if f"time/{phase}" in metrics and metrics.get(tokens):
            found[f"time/{phase}_ms_per_token"] = 1000 * metrics[f"time/{phase}"] / metrics[tokens]
    if "update/tflop" in metrics:
        reached = metrics["update/tflop"] / max(metrics["time/update"], 1e-9) / fabric.world_size
        half = "bf16" in recipe.fabric.precision or (recipe.model.lora is not None and "bf" in recipe.model.dtype)
        name = torch.cuda.get_device_name(fabric.device) if fabric.device.type == "cuda" else ""
        peak = peak_flops(name, half)
        found |= {"time/tflops_per_device": reached} | ({} if peak is None else {"time/mfu": reached * 1e12 / peak})
    return found


@contextmanager
def _timed(meter: Meter, phase: str) -> Iterator[None]:
    start = time.perf_counter()
    with torch.profiler.record_function(phase):
        yield
    meter.max(f"time/{phase}", time.perf_counter() - start)

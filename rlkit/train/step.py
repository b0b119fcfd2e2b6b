"""A step: sample, collate, judge while rewards are scored, credit, learn, publish."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from rlkit.interfaces import outputs
from rlkit.ops.groups import group_stats
from rlkit.ops.masked import masked_mean
from rlkit.registry import calling, require
from rlkit.rollout.collate import add_rewards, collate
from rlkit.train.logps import compute_logps, correct, measure_gap
from rlkit.train.metrics import Meter
from rlkit.train.optim import learning_rate, set_learning_rate
from rlkit.train.rollouts import Rollouts, await_scores, sample
from rlkit.train.setup import TrainContext
from rlkit.train.update import update_models
from rlkit.types import Batch, Trajectory


class StepResult(NamedTuple):
    """What a step made: its rollouts, the batch that was trained on, and figures."""

    rollouts: Rollouts
    batch: Batch
    figures: dict[str, float]


def step(context: TrainContext, number: int) -> StepResult:
    """Make one step of training; the first is 1."""
    meter = Meter()
    with _timed(meter, "sample"):
        rollouts = sample(context.data, context.rollouts, number, meter)
    batch = collate(rollouts.train_on).to(context.device)
    with _timed(meter, "logps"):
        compute_logps(context, batch)
    with _timed(meter, "score"):
        places = await_scores(context.rollouts, rollouts, meter)
    kept = [rollouts.train_on[i] for i in places]
    batch = batch.rows(torch.tensor(places, dtype=torch.long, device=context.device))
    add_rewards(batch, kept)
    if rollouts.greedy is not None:
        batch.greedy_rewards = torch.tensor([rollouts.greedy[t.group] for t in kept], device=context.device)
    shape_rewards(context, batch, meter)
    estimate(context, batch, meter)
    attach_advantages(kept, batch)
    schedule(context, number, meter)
    with _timed(meter, "update"):
        update_models(context, batch, number, meter)
        context.models.update_ema_and_reference(number)
    with _timed(meter, "sync"):
        context.rollouts.version += 1
        context.rollouts.sync_weights()
    describe(context, batch, meter)
    meter.max("version", context.rollouts.version)
    for name, gauge in context.rollouts.engine.health().items():
        meter.max(f"engine/{name}", gauge)
    figures = context.ranks.broadcast_tp(
        meter.result(context.ranks)
    )  # ranks of a tensor-parallel group decide alike by them
    figures["time/tokens_per_second"] = figures.get("rollout/tokens", 0.0) / max(figures["time/sample"], 1e-9)
    return StepResult(rollouts, batch, figures)


def shape_rewards(context: TrainContext, batch: Batch, meter: Meter) -> None:
    """Correct for the engine's mismatch, shape the rewards, and take KL off them."""
    correct(context, batch, meter)
    shaper, kl_penalty = context.transforms.shaper, context.transforms.kl_penalty
    if shaper is not None:
        shaper.apply(batch, context.ranks.all_reduce_sum)
    if kl_penalty is not None:
        for name, value in kl_penalty.apply(batch, context.ranks.all_reduce_sum).items():
            meter.max(f"reward/{name}", value)


def estimate(context: TrainContext, batch: Batch, meter: Meter) -> None:
    """Fill the advantages, count those that are not finite, and name the estimator if they are not what they must be.

    Raises:
        PartError: It raised, or they have another shape or type, or are not finite though all that it read was.
    """
    estimator = context.recipe.advantage
    sound = all(bool(x.isfinite().all()) for x in batch.tensors().values() if x.is_floating_point())
    with calling(estimator, "estimate"):
        estimator.estimate(batch)
    require(estimator, "estimate", outputs.of_estimator(batch) if sound or batch.advantages is None else None)
    if batch.advantages is not None:
        meter.count("advantage/not_finite", float((~batch.advantages.isfinite() & batch.mask).sum()))
    if context.recipe.critic is not None and batch.returns is None:
        require(estimator, "estimate", "left batch.returns unset, which the critic learns from")


def attach_advantages(trajectories: Sequence[Trajectory], batch: Batch) -> None:
    """Leave what was made of each trajectory with it, for the run folder."""
    known = {"advantages": batch.advantages, "values": batch.values, "greedy_reward": batch.greedy_rewards}
    for name, tensor in known.items():
        if tensor is not None:
            for trajectory, row in zip(trajectories, tensor.tolist(), strict=True):
                cut = row[: len(trajectory.tokens)] if isinstance(row, list) else row
                trajectory.credit[name] = cut


def schedule(context: TrainContext, number: int, meter: Meter) -> None:
    """Set the step's learning rates."""
    train, critic, models = context.recipe.train, context.recipe.critic, context.models
    for name, trained, section in (("lr", models.policy, train), ("critic/lr", models.critic, critic)):
        if trained is not None and section is not None:
            rate = learning_rate(section, number, train.steps)
            set_learning_rate(trained.optimizer, rate)
            meter.max(name, rate)


def describe(context: TrainContext, batch: Batch, meter: Meter) -> None:
    """Measure the rewards' spread, the advantages, the critic, and the gap between engine and trainer."""
    stats = group_stats(batch.rewards, batch.group)
    meter.means("reward/std", stats.std.tolist())
    meter.means("groups/no_signal", stats.equal.float().tolist())
    measure_gap(context, batch, meter)
    if batch.advantages is not None and len(batch):
        meter.max("advantage/max", batch.advantages.max())
        meter.max("advantage/abs_mean", masked_mean(batch.advantages.abs(), batch.mask))
    if batch.values is not None and batch.returns is not None and int(batch.mask.sum()) > 1:
        meter.mean("critic/explained_variance", explained_variance(batch.values[batch.mask], batch.returns[batch.mask]))


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """Return 1 - var(returns - values) / (var(returns) + 1e-5) of [N] tokens."""
    return 1 - (returns - values).var() / (returns.var() + 1e-5)


@contextmanager
def _timed(meter: Meter, phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    meter.max(f"time/{phase}", time.perf_counter() - start)

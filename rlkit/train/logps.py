"""What is computed of a batch before an update: log-probs, values, corrections; rewards may still be missing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rlkit.ops import correction
from rlkit.ops.masked import masked_mean
from rlkit.train.metrics import Meter
from rlkit.train.microbatch import forward_in_micro_batches
from rlkit.train.setup import TrainContext
from rlkit.types import Batch, PolicyOutput


def compute_logps(context: TrainContext, batch: Batch) -> None:
    """Fill what the recipe needs of `trainer_logps`, `old_logps`, `ref_logps` and `values`; rewards may be missing."""
    recipe, models = context.recipe, context.models
    if recipe.needs_old_logps:
        out = policy_logps(context, batch)
        batch.trainer_logps, batch.sum_pi_squared = out.logps, out.sum_pi_squared
        batch.old_logps = out.logps
    if recipe.train.old_logps == "rollout":
        batch.old_logps = batch.rollout_logps
    limit, agree = recipe.train.max_tokens_per_micro_batch, context.ranks.all_reduce_max
    fabric, temperature = context.ranks.fabric, recipe.rollout.sampling.temperature
    if (reference := models.reference) is not None:

        def reference_logps(tokens: Tensor, mask: Tensor) -> tuple[Tensor]:
            with fabric.autocast():
                return (reference.logps(tokens, mask, temperature),)

        [batch.ref_logps] = forward_in_micro_batches(reference_logps, batch, limit, agree)
    if (critic := models.critic) is not None:

        def values(tokens: Tensor, mask: Tensor) -> tuple[Tensor]:
            with fabric.autocast():
                return (critic.inner(tokens, mask),)

        [batch.values] = forward_in_micro_batches(values, batch, limit, agree)


def correct(context: TrainContext, batch: Batch, meter: Meter) -> None:
    """Weigh or reject tokens by the gap between engine and trainer."""
    weigh, reject, reduce = context.recipe.correction, context.recipe.rejection, context.ranks.all_reduce_sum
    if batch.trainer_logps is None:
        return
    both = (batch.trainer_logps, batch.rollout_logps, batch.mask)
    if weigh is not None:
        batch.correction_weights = correction.importance_weights(
            *both, level=weigh.level, low=weigh.low, high=weigh.high
        )
        mean = masked_mean(batch.correction_weights, batch.mask, reduce)
        meter.max("correction/weight_mean", mean)
    if reject is not None:
        batch.accepted = correction.accepted(
            *both, statistic=reject.statistic, level=reject.level, low=reject.low, high=reject.high
        )
        meter.max("correction/rejected", 1 - masked_mean(batch.accepted, batch.mask, reduce))


def policy_logps(context: TrainContext, batch: Batch) -> PolicyOutput:
    """Return the current policy's log-probs, entropies and sums of squares, each [B,T] f32."""
    train, temperature = context.recipe.train, context.recipe.rollout.sampling.temperature
    actor, fabric = context.models.actor, context.ranks.fabric

    def forward(tokens: Tensor, mask: Tensor) -> Sequence[Tensor]:
        with fabric.autocast():
            return actor(tokens, mask, temperature)  # type: ignore[no-any-return]

    agree = context.ranks.all_reduce_max
    found = forward_in_micro_batches(forward, batch, train.max_tokens_per_micro_batch, agree, count=3)
    return PolicyOutput(*found)


def measure_gap(context: TrainContext, batch: Batch, meter: Meter) -> None:
    """Log how far the trainer's log-probs are from the engine's; every rank must call this."""
    assert batch.trainer_logps is not None
    known = batch.mask & ~batch.trainer_logps.isnan()
    difference = (batch.trainer_logps - batch.rollout_logps)[known].abs()
    if len(difference):
        meter.mean("mismatch/mean", difference.mean(), weight=len(difference))
        meter.max("mismatch/max", difference.max())
    figures = correction.gap(batch.trainer_logps, batch.rollout_logps, known, context.ranks.all_reduce_sum)
    for name, value in figures._asdict().items():
        meter.max(f"mismatch/{name}", value)

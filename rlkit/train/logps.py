"""What is computed of a batch before an update: log-probs and values; rewards may still be missing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlkit.interfaces.advantage import Needs
from rlkit.models.actor import Actor, ValueModel
from rlkit.models.lora import base_model
from rlkit.models.reference import FrozenPolicy
from rlkit.ops import correction
from rlkit.ops.logps import LOGPS
from rlkit.ops.masked import Reducer
from rlkit.train.metrics import Meter
from rlkit.train.microbatch import Forward, forward_in_micro_batches
from rlkit.train.setup import TrainContext
from rlkit.types import Reads, RolloutBatch, TrainBatch


def compute_logps(context: TrainContext, batch: RolloutBatch) -> None:
    """Fill what the recipe needs of `trainer_logps`, `old_logps`, `ref_logps` and `values`."""
    recipe, critic = context.recipe, context.models.critic
    if recipe.needs_old_logps:
        squares = Needs.SUM_PI_SQUARED in recipe.needs
        batch.trainer_logps, *statistics = policy_logps(context, batch, Reads(entropy=False, squares=squares))
        batch.sum_pi_squared = statistics[0] if statistics else None
        batch.old_logps = batch.trainer_logps
    if recipe.train.old_logps != "recompute":
        batch.old_logps = batch.rollout_logps
    reference = context.models.reference
    if reference is not None and recipe.needs_ref_logps:
        batch.ref_logps = frozen_logps(context, batch, reference)
    if critic is not None and recipe.critic is not None:
        values = critic.inner
        [batch.values] = _forward(
            context, batch, lambda tokens, mask, part: (values(tokens, mask, part.media),), values
        )


def policy_logps(context: TrainContext, batch: RolloutBatch, reads: Reads = LOGPS) -> list[Tensor]:
    """Return the current policy's log-probs [B,T] f32, and what else is read of its distributions."""
    actor, temperature = context.models.actor, context.recipe.rollout.sampling.temperature

    def forward(tokens: Tensor, mask: Tensor, part: RolloutBatch) -> Sequence[Tensor]:
        restricted = reads._replace(candidates=part.candidates)
        return [x for x in actor(tokens, mask, temperature, restricted, media=part.media) if x is not None]

    return _forward(context, batch, forward, actor)


def frozen_logps(context: TrainContext, batch: RolloutBatch, frozen: FrozenPolicy) -> Tensor:
    """Return the log-probs [B,T] f32 of a model that is not trained."""
    temperature = context.recipe.rollout.sampling.temperature

    def forward(tokens: Tensor, mask: Tensor, part: RolloutBatch) -> Sequence[Tensor]:
        return (frozen.logps(tokens, mask, temperature, part.media, part.candidates),)

    with frozen.applied():
        return _forward(context, batch, forward, frozen)[0]


def columns_of(actor: Actor) -> int:
    """Return the number of columns of a policy's output layer, which may exceed the tokenizer's vocabulary."""
    return base_model(actor.policy).config.get_text_config().vocab_size


def frozen_top(
    context: TrainContext,
    batch: RolloutBatch,
    frozen: FrozenPolicy,
    count: int,
    split: tuple[Tensor, Tensor] | None = None,
) -> list[Tensor]:
    """Return the ids [B,T,K] i64 and log-probs [B,T,K+1] f32 of the tokens that a model finds most likely.

    They are among those that the policy has, too: models of one tokenizer may have unlike numbers of columns. With
    `split` (see `Reads`), which says so for another tokenizer, the log-probs [B,T] f32 of the batch's tokens follow.
    """
    temperature = context.recipe.rollout.sampling.temperature
    reads = Reads(entropy=False, top=count, columns=columns_of(context.models.actor), split=split)

    def forward(tokens: Tensor, mask: Tensor, part: RolloutBatch) -> Sequence[Tensor]:
        top = frozen.top(tokens, mask, temperature, reads, part.media)
        return top[:2] if split is None else top

    with frozen.applied():
        return _forward(context, batch, forward, frozen)


def log_mismatch(context: TrainContext, batch: TrainBatch, meter: Meter) -> None:
    """Log the mismatch of engine and trainer in a batch that the latest update trained on; all ranks must call this."""
    measure_gap(batch, context.rollouts.version - 1, context.ranks.all_reduce_sum, meter)


def measure_gap(batch: TrainBatch, version: int, reduce: Reducer, meter: Meter) -> None:
    """Log how far the trainer's log-probs are from the engine's; every rank must call this.

    Args:
        batch: With the log-probs of both.
        version: Of the weights of the trainer's. Tokens of older weights differ because of what was learned since, and
            are measured apart.
        reduce: Sums over ranks.
        meter: Takes the metrics.
    """
    is_current = batch.mask & ~batch.trainer_logps.isnan()
    old = is_current & (batch.versions < version)
    is_current &= ~old
    difference = (batch.trainer_logps - batch.rollout_logps)[is_current].abs()
    if len(difference):
        meter.mean("mismatch/mean", difference.mean(), weight=len(difference))
        meter.max("mismatch/max", difference.max())
    count, older = reduce(torch.stack((is_current.sum(), old.sum())).float()).tolist()
    if count or not older:
        for name, value in (
            correction.logp_mismatch(batch.trainer_logps, batch.rollout_logps, is_current, reduce)._asdict().items()
        ):
            meter.max(f"mismatch/{name}", value)
    if older:
        meter.max("staleness/k3", correction.logp_mismatch(batch.trainer_logps, batch.rollout_logps, old, reduce).k3)


def _forward(
    context: TrainContext, batch: RolloutBatch, fn: Forward, module: Actor | ValueModel | FrozenPolicy
) -> list[Tensor]:
    """Compute tensors [B,T,...] in the precision and the micro-batches of updates."""

    def autocast(tokens: Tensor, mask: Tensor, part: RolloutBatch) -> Sequence[Tensor]:
        with context.ranks.fabric.autocast():
            return fn(tokens, mask, part)

    limit, agree = context.data.token_limit, context.ranks.all_reduce_max
    return forward_in_micro_batches(autocast, batch, limit, agree, packed=module.passes.packs(batch.media))

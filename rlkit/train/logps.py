"""What is computed of a batch before an update: log-probs and values; rewards may still be missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rlkit.distributed.ranks import Ranks
from rlkit.interfaces.advantage import Needs
from rlkit.interfaces.placement import PlacedModel
from rlkit.models.actor import Actor, ValueModel
from rlkit.models.lora import base_model
from rlkit.models.reference import FrozenPolicy
from rlkit.ops import correction
from rlkit.ops.logps import LOGPS
from rlkit.ops.masked import Reducer
from rlkit.ops.routes import ROUTES
from rlkit.recipe import Recipe
from rlkit.train.metrics import Meter
from rlkit.train.microbatch import Forward, forward_in_micro_batches
from rlkit.train.models import Models, TrainableModule
from rlkit.types import Reads, RolloutBatch, TrainBatch


class Passes(Protocol):
    """What passes over rows depend on: the recipe, and the tokens of a micro-batch."""

    @property
    def recipe(self) -> Recipe: ...

    @property
    def token_limit(self) -> int: ...


def compute_logps(data: Passes, models: Models, ranks: Ranks, batch: RolloutBatch) -> None:
    """Fill what the recipe needs of `trainer_logps`, `old_logps`, `ref_logps` and `values`.

    Args:
        data: Of the run or a mixture, with its recipe and the size of micro-batches.
        models: The policy, and the critic and the reference where the recipe has them.
        ranks: This rank among the others.
        batch: The rows of this rank.
    """
    recipe, critic, reference = data.recipe, models.critic, models.reference
    computed: dict[str, Callable[[], Tensor]] = {}  # a pool computes beside the policy
    if reference is not None and recipe.needs_ref_logps:
        computed["ref_logps"] = begin_logps(data, reference, ranks, batch)
    if critic is not None and recipe.critic is not None:
        computed["values"] = begin_values(data, critic, ranks, batch)
    if recipe.needs_old_logps:
        reads = Reads(entropy=False, squares=Needs.SUM_PI_SQUARED in recipe.needs)
        batch.trainer_logps, *statistics = policy_logps(data, models.actor, ranks, batch, reads)
        batch.sum_pi_squared = statistics[0] if statistics else None
        batch.old_logps = batch.trainer_logps
    if recipe.train.old_logps != "recompute":
        batch.old_logps = batch.rollout_logps
    for name, result in computed.items():
        setattr(batch, name, result())


def begin_values(
    data: Passes, critic: TrainableModule[ValueModel] | PlacedModel, ranks: Ranks, batch: RolloutBatch
) -> Callable[[], Tensor]:
    """Return a function that returns the critic's values [B,T] f32, which a pool begins to compute now."""
    if isinstance(critic, PlacedModel):
        reply = critic.ask("values", batch)
        return lambda: reply().tensors["values"]
    values = critic.inner

    def forward(tokens: Tensor, mask: Tensor, part: RolloutBatch) -> Sequence[Tensor]:
        return (values(tokens, mask, part.media),)

    return lambda: _forward(data, ranks, batch, forward, values)[0]


def begin_logps(
    data: Passes, frozen: FrozenPolicy | PlacedModel, ranks: Ranks, batch: RolloutBatch
) -> Callable[[], Tensor]:
    """Return a function that returns the log-probs [B,T] f32 of a frozen model, which a pool begins to compute now."""
    temperature = data.recipe.rollout.sampling.temperature
    if isinstance(frozen, PlacedModel):
        reply = frozen.ask("logps", batch, temperature=temperature)
        return lambda: reply().tensors["logps"]

    def forward(tokens: Tensor, mask: Tensor, part: RolloutBatch) -> Sequence[Tensor]:
        return (frozen.logps(tokens, mask, temperature, part.media, part.candidates),)

    def compute() -> Tensor:
        with frozen.applied():
            return _forward(data, ranks, batch, forward, frozen)[0]

    return compute


def policy_logps(data: Passes, actor: Actor, ranks: Ranks, batch: RolloutBatch, reads: Reads = LOGPS) -> list[Tensor]:
    """Return the current policy's log-probs [B,T] f32, and what else is read of its distributions."""
    temperature = data.recipe.rollout.sampling.temperature

    def forward(tokens: Tensor, mask: Tensor, part: RolloutBatch) -> Sequence[Tensor]:
        out = actor(tokens, mask, temperature, restricted(reads, part), media=part.media)
        return [x for x in out if x is not None]

    return _forward(data, ranks, batch, forward, actor)


def restricted(reads: Reads, batch: RolloutBatch) -> Reads:
    """Restrict the distributions to these rows' candidates, computed by the experts that the engine selected."""
    routes = batch.fields.get(ROUTES) if len(batch) else None
    return reads._replace(candidates=batch.candidates, expert_routes=routes)


def columns_of(actor: Actor) -> int:
    """Return the number of columns of a policy's output layer, which may exceed the tokenizer's vocabulary."""
    return base_model(actor.policy).config.get_text_config().vocab_size


def frozen_top(
    data: Passes, frozen: FrozenPolicy | PlacedModel, ranks: Ranks, batch: RolloutBatch, reads: Reads
) -> list[Tensor]:
    """Return the ids [B,T,K] i64 and log-probs [B,T,K+1] f32 of the tokens that a model finds most likely.

    They are among those that the policy has, too (`reads.columns`): models of one tokenizer may have unlike numbers of
    columns. With `reads.split`, which says so for another tokenizer, the log-probs [B,T] f32 of the batch's tokens
    follow.
    """
    temperature = data.recipe.rollout.sampling.temperature
    if isinstance(frozen, PlacedModel):
        top = frozen.ask("top", batch, temperature=temperature, count=reads.top, columns=reads.columns)().tensors
        return [top["ids"], top["logps"]]

    def forward(tokens: Tensor, mask: Tensor, part: RolloutBatch) -> Sequence[Tensor]:
        top = frozen.top(tokens, mask, temperature, reads, part.media)
        return top[:2] if reads.split is None else top

    with frozen.applied():
        return _forward(data, ranks, batch, forward, frozen)


def log_mismatch(batch: TrainBatch, version: int, reduce: Reducer, meter: Meter) -> None:
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
    data: Passes, ranks: Ranks, batch: RolloutBatch, fn: Forward, module: Actor | ValueModel | FrozenPolicy
) -> list[Tensor]:
    """Compute tensors [B,T,...] in the precision and the micro-batches of updates."""

    def autocast(tokens: Tensor, mask: Tensor, part: RolloutBatch) -> Sequence[Tensor]:
        with ranks.fabric.autocast():
            return fn(tokens, mask, part)

    packed = module.passes.packs(batch.media)
    return forward_in_micro_batches(autocast, batch, data.token_limit, ranks.all_reduce_max, packed=packed)

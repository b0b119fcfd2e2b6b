"""Updating the policy and the critic: optimizer steps over micro-batches whose split changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rlkit.interfaces import outputs
from rlkit.ops.random import RowNoise, permutation
from rlkit.recipe import Recipe
from rlkit.registry import calling, require
from rlkit.sections import Train
from rlkit.train.logps import policy_logps
from rlkit.train.metrics import Meter
from rlkit.train.microbatch import aligned_micro_batches, select_rows
from rlkit.train.objective import LossShare, Objective, count_tokens, value_share
from rlkit.train.setup import TrainContext
from rlkit.types import Batch, PolicyOutput, TrainBatch


class Update(NamedTuple):
    """An optimizer step: the gradient's norm before clipping, and this rank's share of the mini-batch's loss."""

    norm: Tensor
    loss: float


class Updatable(Protocol):
    """What an optimizer step needs of a module: see `TrainableModule`."""

    def accumulating(self, more: bool) -> AbstractContextManager[None]:
        """Return the context of a pass; ranks exchange gradients in the last one, after which no `more` follow."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's share of a loss."""

    def clip_gradients(self) -> Tensor:
        """Clip the gradient over all ranks; return its norm before."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer."""


def update_models(context: TrainContext, scored: Batch, step: int, meter: Meter) -> TrainBatch:
    """Take `epochs * minibatches` optimizer steps with the policy, and as many with the critic if there is one.

    Log-probs of the trainer that nothing needed before are those of the first optimizer step, NaN in other rows.

    Returns:
        The batch that was trained on.
    """
    critic = context.recipe.critic
    record = scored.trainer_logps is None
    batch = TrainBatch.of(scored)
    most = context.recipe.groups_per_step
    for number, groups in enumerate(mini_batches(context.recipe.train, step, most)):  # agreed: their order is seeded
        rows = [i for i, group in enumerate(batch.group.tolist()) if group in groups]
        if critic is not None:
            update_critic(context, batch, rows, meter)
        if critic is None or step > critic.policy_delay_steps:
            noise = embedding_noise(batch, context.recipe, f"{step}/{number}")
            update_policy(context, batch, rows, meter, record, noise=noise)
            record = False
    return batch


def mini_batches(train: Train, step: int, groups: int) -> Iterator[set[int]]:
    """Yield the groups of each mini-batch, of so many, the same on every rank."""
    for epoch in range(train.epochs):
        order = permutation(f"minibatches/{train.seed}/{step}/{epoch}", groups)
        for part in order.tensor_split(train.minibatches):
            yield set(part.tolist())


def embedding_noise(batch: TrainBatch, recipe: Recipe, update: str) -> RowNoise | None:
    """Return NEFTune's noise of each row in an optimizer step: uniform, up to alpha / sqrt(tokens * width)."""
    alpha = recipe.loss.embedding_noise
    if not alpha:
        return None
    lengths = batch.attention.sum(-1)
    return RowNoise.of_rows(
        f"noise/{recipe.train.seed}/{update}", batch.tokens, lengths, batch.group, alpha / lengths.sqrt()
    )


def accumulate_and_step(module: Updatable, micros: list[list[int]], loss_of: Callable[[list[int]], Tensor]) -> Update:
    """Make one optimizer step over micro-batches, of which every rank has as many, some of them without rows.

    A gradient that is not finite changes nothing, on every rank alike.
    """
    total = 0.0
    for i, micro in enumerate(micros):
        with module.accumulating(more=i < len(micros) - 1):
            loss = loss_of(micro)
            total += loss.item() if micro else 0.0
            module.backward(loss)
    norm = module.clip_gradients()
    if bool(torch.isfinite(norm)):
        module.optimizer.step()
    module.optimizer.zero_grad()
    return Update(norm, total)


def log_update(update: Update, meter: Meter, prefix: str, ranks: int) -> None:
    """Log an optimizer step of the policy or the critic: losses are means over the optimizer steps of a step."""
    finite = float(torch.isfinite(update.norm))
    meter.mean(f"{prefix}/loss", update.loss * ranks)
    meter.mean("grad_norm" if prefix == "policy" else f"{prefix}/grad_norm", update.norm)
    meter.count("update/not_finite", (1 - finite) / ranks)
    meter.count("update/steps" if prefix == "policy" else f"{prefix}/steps", finite / ranks)


def log_share(share: LossShare, batch: TrainBatch, meter: Meter, prefix: str) -> None:
    """Log the figures of a micro-batch, which count by its number of chosen tokens or of rows."""
    tokens = float(batch.mask.sum())
    for name, value in share.figures.items():
        meter.mean(f"{prefix}/{name}", value, weight=len(batch) if name in share.by_row else tokens)


def update_policy(
    context: TrainContext,
    batch: TrainBatch,
    rows: list[int],
    meter: Meter,
    record: bool = False,
    *,
    noise: RowNoise | None = None,
) -> None:
    """Make one optimizer step of the policy from the rows of this rank; ranks may have unequal rows, or none.

    With `record`, the log-probs of this pass become `batch.trainer_logps`. `noise` of all rows of the batch is added to
    the embeddings in passes with a gradient.
    """
    recipe, ranks, policy = context.recipe, context.ranks, context.models.policy
    objective = Objective.of(recipe, context.rollouts.version, strict=context.rollouts.version == 0)
    counts = objective.count(batch, rows, recipe.groups_per_step, ranks.all_reduce_sum)
    if counts.tokens == 0:  # agreed: counted over all ranks
        meter.count("update/empty", 1 / ranks.count)
        return
    if recipe.loss.selects:
        select_tokens(context, batch, rows, record)

    def loss_of(micro: list[int]) -> Tensor:
        part, tokens, mask = select_rows(batch, micro)
        added = noise.rows(micro) if noise is not None and micro and torch.is_grad_enabled() else None
        out: PolicyOutput = policy.module(
            tokens, mask, recipe.rollout.sampling.temperature, recipe.loss.reads, noise=added
        )
        if not micro:
            return out.logps.sum()
        if record:
            record_logps(batch, micro, part, out.logps.detach())
        record_entropy(batch, micro, out.entropy)
        share = objective.share(out, part, counts)
        log_share(share, part, meter, "policy")
        return share.loss

    def divided(rows: list[int]) -> list[list[int]]:
        limit, packed = context.data.token_limit, policy.inner.passes.packed and noise is None
        groups = recipe.loss.reads_groups
        return aligned_micro_batches(batch, rows, limit, ranks.all_reduce_max, packed, whole_groups=groups)

    taught = objective.rows_with_gradient(batch).tolist()
    with torch.no_grad():  # what others are logged and recorded for
        for micro in divided([i for i in rows if not taught[i]]):
            loss_of(micro)
    micros = divided([i for i in rows if taught[i]])
    log_update(accumulate_and_step(policy, micros or [[]], loss_of), meter, "policy", ranks.count)


def record_logps(batch: TrainBatch, rows: list[int], part: TrainBatch, logps: Tensor) -> None:
    """Keep the log-probs [b,t] of some rows as the trainer's, in the batch and in `part`, which was cut out of it.

    They are the old policy's too, unless ratios compare with the engine's.
    """
    batch.trainer_logps[rows] = torch.nn.functional.pad(logps, (0, batch.tokens.shape[1] - logps.shape[1]))
    part.trainer_logps = logps
    if batch.old_logps is batch.trainer_logps:
        part.old_logps = logps


def record_entropy(batch: TrainBatch, rows: list[int], entropy: Tensor | None) -> None:
    """Keep the entropies [b,t] of some rows where this is the first pass over them."""
    if batch.entropy is not None and entropy is not None:
        before = batch.entropy[rows, : entropy.shape[1]]
        batch.entropy[rows, : entropy.shape[1]] = torch.where(before.isnan(), entropy.detach(), before)


def select_tokens(context: TrainContext, batch: TrainBatch, rows: list[int], record: bool) -> None:
    """Set `batch.selected` [B,T] to the tokens that the loss treats apart among the rows of a mini-batch.

    With `record`, nothing has computed the old log-probs yet: those of this pass are the old policy's.
    """
    loss = context.recipe.loss
    part, _, _ = select_rows(batch, rows)
    [logps] = policy_logps(context, part)
    if record:
        record_logps(batch, rows, part, logps)
    part = Objective.of(context.recipe, context.rollouts.version).with_old_logps(logps, part)
    with calling(loss, "select"):
        selected = loss.select(logps, part)
    require(loss, "select", outputs.of_selection(selected, part.mask))
    batch.selected = torch.zeros_like(batch.mask)
    batch.selected[rows, : selected.shape[1]] = selected


def update_critic(context: TrainContext, batch: TrainBatch, rows: list[int], meter: Meter) -> None:
    """Make one optimizer step of the critic, if there is one."""
    critic, section, ranks = context.models.critic, context.recipe.critic, context.ranks
    counts = count_tokens(batch.mask[rows], ranks.all_reduce_sum)
    if critic is None or section is None or counts.tokens == 0:
        return
    values_of, bound = critic.module, section.clip

    def loss_of(micro: list[int]) -> Tensor:
        part, tokens, mask = select_rows(batch, micro)
        values: Tensor = values_of(tokens, mask)
        if not micro:
            return values.sum()
        share = value_share(values, part, counts.tokens, bound)
        log_share(share, part, meter, "critic")
        return share.loss

    limit, packed = context.data.token_limit, critic.inner.passes.packed
    micros = aligned_micro_batches(batch, rows, limit, ranks.all_reduce_max, packed)
    log_update(accumulate_and_step(critic, micros, loss_of), meter, "critic", ranks.count)

"""Learning from a batch: optimizer steps over micro-batches whose split changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlkit.distributed.fsdp2 import accumulating, clip
from rlkit.interfaces import outputs
from rlkit.ops import aggregate, kl
from rlkit.ops.masked import Reducer, masked_mean, masked_sum
from rlkit.ops.random import permutation
from rlkit.registry import calling, require
from rlkit.sections import Train
from rlkit.train.logps import policy_logps
from rlkit.train.metrics import Meter
from rlkit.train.microbatch import aligned_micro_batches, select_rows
from rlkit.train.models import M, TrainableModule
from rlkit.train.setup import TrainContext
from rlkit.types import Batch, LossOutput, PolicyOutput


class Counts(NamedTuple):
    """What a mini-batch has over all ranks: the only numbers that a loss is divided by."""

    tokens: Tensor
    sequences: Tensor


class Update(NamedTuple):
    """An optimizer step: the gradient's norm before clipping, and the mini-batch's loss over all ranks' rows."""

    norm: Tensor
    loss: float


def update_models(context: TrainContext, batch: Batch, number: int, meter: Meter) -> None:
    """Take `epochs * minibatches` optimizer steps with the policy, and as many with the critic if there is one.

    If nothing needed `batch.trainer_logps` before, those of the first optimizer step's rows are kept, the others NaN.
    """
    critic = context.recipe.critic
    record = batch.trainer_logps is None
    if batch.trainer_logps is None:
        batch.trainer_logps = torch.full_like(batch.rollout_logps, torch.nan)
    if batch.old_logps is None:
        batch.old_logps = batch.trainer_logps
    for groups in mini_batches(context.recipe.train, number):
        rows = [i for i, group in enumerate(batch.group.tolist()) if group in groups]
        if critic is not None:
            update_critic(context, batch, rows, meter)
        if critic is None or number > critic.policy_delay_steps:
            update(context, batch, rows, meter, record)
            record = False


def mini_batches(train: Train, number: int) -> Iterator[set[int]]:
    """Return the groups of each mini-batch, the same on every rank."""
    for epoch in range(train.epochs):
        order = permutation(f"minibatches/{train.seed}/{number}/{epoch}", train.prompts_per_step)
        for part in order.tensor_split(train.minibatches):
            yield set(part.tolist())


def count_tokens(mask: Tensor, reduce: Reducer) -> Counts:
    """Count the tokens and the sequences under a mask, over all ranks."""
    tokens, sequences = reduce(torch.stack((mask.sum(), mask.any(-1).sum())).float())
    return Counts(tokens, sequences)


def accumulate_and_step(
    context: TrainContext,
    trained: TrainableModule[M],
    batch: Batch,
    rows: Sequence[int],
    loss_of: Callable[[Sequence[int]], Tensor],
) -> Update:
    """Make one optimizer step over micro-batches; the loss that is returned is this rank's share times the ranks.

    Ranks make the same number of passes, some of them without rows. A gradient that is not finite changes nothing, on
    every rank alike.
    """
    limit, fabric = context.recipe.train.max_tokens_per_micro_batch, context.ranks.fabric
    micros = aligned_micro_batches(batch, rows, limit, context.ranks.all_reduce_max)
    total = 0.0
    for i, micro in enumerate(micros):
        with accumulating(fabric, trained.module, more=i < len(micros) - 1):
            loss = loss_of(micro) * context.ranks.count
            total += float(loss.detach()) if micro else 0.0
            fabric.backward(loss)
    norm = clip(fabric, trained.module, trained.optimizer, trained.max_grad_norm)
    if bool(torch.isfinite(norm)):
        trained.optimizer.step()
    trained.optimizer.zero_grad()
    return Update(norm, total)


def note_update(context: TrainContext, made: Update, meter: Meter, prefix: str) -> None:
    """Log an optimizer step of the policy or the critic: losses are means over the steps of a rollout."""
    finite = float(torch.isfinite(made.norm))
    meter.mean(f"{prefix}/loss", made.loss)
    meter.mean("grad_norm" if prefix == "policy" else f"{prefix}/grad_norm", made.norm)
    meter.count("update/not_finite", (1 - finite) / context.ranks.count)
    meter.count("update/steps" if prefix == "policy" else f"{prefix}/steps", finite / context.ranks.count)


def update(context: TrainContext, batch: Batch, rows: Sequence[int], meter: Meter, record: bool = False) -> None:
    """Make one optimizer step of the policy from the rows of this rank; ranks may have unequal rows, or none.

    With `record`, the log-probs of this pass become `batch.trainer_logps`.
    """
    recipe = context.recipe
    _, in_denominator = loss_masks(context, batch)
    counts = count_tokens(in_denominator[rows], context.ranks.all_reduce_sum)
    if counts.tokens == 0:
        meter.count("update/empty", 1 / context.ranks.count)
        return
    if recipe.loss.selects:
        select_tokens(context, batch, rows, record)

    def loss_of(micro: Sequence[int]) -> Tensor:
        part, tokens, mask = select_rows(batch, micro)
        out: PolicyOutput = context.models.policy.module(tokens, mask, recipe.rollout.sampling.temperature)
        if not micro:
            return out.logps.sum()
        if record:
            assert batch.trainer_logps is not None
            batch.trainer_logps[list(micro), : mask.shape[1]] = out.logps.detach()
            if recipe.train.old_logps == "recompute":
                part.old_logps = out.logps.detach()
        return policy_loss(context, part, out, counts, meter)

    note_update(context, accumulate_and_step(context, context.models.policy, batch, rows, loss_of), meter, "policy")


def select_tokens(context: TrainContext, batch: Batch, rows: Sequence[int], record: bool) -> None:
    """Set `batch.selected` [B,T] to the tokens that the loss treats apart among the rows of a mini-batch.

    With `record`, nothing has computed the old log-probs yet: those of this pass are the old policy's.
    """
    index = torch.tensor(rows, dtype=torch.long, device=context.device)
    chosen = batch.rows(index)
    logps = policy_logps(context, chosen).logps
    if record:
        assert batch.trainer_logps is not None
        batch.trainer_logps[index, : logps.shape[1]] = logps  # `old_logps` too, unless it is the engine's
        chosen = batch.rows(index)
    with calling(context.recipe.loss, "select"):
        selected = context.recipe.loss.select(logps, chosen)
    require(context.recipe.loss, "select", outputs.of_selection(selected, chosen.mask))
    batch.selected = torch.zeros_like(batch.mask)
    batch.selected[index, : selected.shape[1]] = selected


def loss_masks(context: TrainContext, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the tokens [B,T] that the policy learns from, and those that its loss is divided by."""
    kept = batch.mask if batch.accepted is None else batch.accepted
    rejection = context.recipe.rejection
    return kept, batch.mask if rejection is not None and rejection.keep_in_denominator else kept


def policy_loss(context: TrainContext, batch: Batch, out: PolicyOutput, counts: Counts, meter: Meter) -> Tensor:
    """Return a micro-batch's share of the mini-batch's loss."""
    recipe = context.recipe
    result = call_loss(context, out, batch)
    per_token, figures = add_terms(context, result, out, batch)
    kept, in_denominator = loss_masks(context, batch)
    weights = aggregate.weights(
        in_denominator,
        recipe.train.aggregation or recipe.loss.aggregation,
        tokens=counts.tokens,
        sequences=counts.sequences,
        budget=recipe.rollout.sampling.max_tokens,
    )
    loss = masked_sum(per_token * weights, kept)
    for name, value in figures.items():
        meter.mean(f"policy/{name}", value.detach(), weight=float(batch.mask.sum()))
    return loss


def call_loss(context: TrainContext, out: PolicyOutput, batch: Batch) -> LossOutput:
    """Return the policy loss, and name it if it is not what it must be.

    Raises:
        PartError: It raised, has another shape or type, or is not finite in the first step though all that it read was.
    """
    loss = context.recipe.loss
    with calling(loss, "__call__"):
        result = loss(out, batch)
    require(loss, "__call__", outputs.of_loss(result, batch.mask))
    if context.rollouts.version == 0:
        read = [x for x in (out.logps, batch.old_logps, batch.advantages, result.per_token) if x is not None]
        *sound, finite = (bool(x[batch.mask].isfinite().all()) for x in read)
        require(loss, "__call__", "gave a loss that is not finite" if all(sound) and not finite else None)
    return result


def add_terms(
    context: TrainContext, result: LossOutput, out: PolicyOutput, batch: Batch
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weigh the policy loss for the engine's mismatch, and add the entropy and KL terms, token by token."""
    recipe = context.recipe
    per_token, figures = result.per_token, dict(result.metrics)
    if batch.correction_weights is not None and not recipe.loss.applies_correction:
        per_token = per_token * batch.correction_weights
    if out.entropy is not None:
        figures["entropy"] = masked_mean(out.entropy, batch.mask)
        if recipe.train.entropy_coef:
            per_token = per_token - recipe.train.entropy_coef * out.entropy
    if recipe.kl_loss is not None and batch.ref_logps is not None:
        divergence = kl.estimate(out.logps, batch.ref_logps, recipe.kl_loss.estimator)
        figures["kl_ref"] = masked_mean(divergence, batch.mask)
        per_token = per_token + recipe.kl_loss.coef * divergence
    return per_token, figures


def update_critic(context: TrainContext, batch: Batch, rows: Sequence[int], meter: Meter) -> None:
    """Make one optimizer step of the critic."""
    critic = context.models.critic
    assert critic is not None
    counts = count_tokens(batch.mask[rows], context.ranks.all_reduce_sum)
    if counts.tokens == 0:
        return

    def loss_of(micro: Sequence[int]) -> Tensor:
        part, tokens, mask = select_rows(batch, micro)
        values: Tensor = critic.module(tokens, mask)
        return value_loss(context, part, values, counts, meter) if micro else values.sum()

    note_update(context, accumulate_and_step(context, critic, batch, rows, loss_of), meter, "critic")


def value_loss(context: TrainContext, batch: Batch, values: Tensor, counts: Counts, meter: Meter) -> Tensor:
    """Return a micro-batch's share of 0.5 mean(max((v - R)^2, (clip(v, v_old +- clip) - R)^2)) over all tokens."""
    assert context.recipe.critic is not None
    assert batch.values is not None
    assert batch.returns is not None
    bound, error = context.recipe.critic.clip, (values - batch.returns) ** 2
    clipped = error
    if bound is not None:
        clipped = (torch.clamp(values, batch.values - bound, batch.values + bound) - batch.returns) ** 2
    worst = torch.maximum(error, clipped)
    loss = 0.5 * masked_sum(worst, batch.mask) / counts.tokens
    meter.mean("critic/clip_fraction", masked_mean(clipped > error, batch.mask), weight=float(batch.mask.sum()))
    return loss

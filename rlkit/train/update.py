"""Updating the policy and the critic: optimizer steps over micro-batches whose split changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkit.data.data import Data
from rlkit.distributed.ranks import Ranks
from rlkit.interfaces import outputs
from rlkit.interfaces.callback import TrainingBatch
from rlkit.interfaces.loss import Inputs
from rlkit.interfaces.placement import PlacedModel, PoolReply
from rlkit.models.actor import Actor, ValueModel
from rlkit.ops.random import RowNoise, permutation
from rlkit.recipe import Recipe, Train
from rlkit.registry import calling, require
from rlkit.rollout.service import RolloutService
from rlkit.train.logps import Passes, policy_logps, restricted
from rlkit.train.metrics import Meter
from rlkit.train.microbatch import aligned_micro_batches, select_rows
from rlkit.train.mixtures import Mixed, mixed
from rlkit.train.models import Models, TrainableModule
from rlkit.train.objective import LossShare, Objective, count_tokens, value_share
from rlkit.types import PolicyOutput, TrainBatch


class Term(NamedTuple):
    """One term of what an optimizer step minimises: a loss and its weight.

    Args:
        prefix: Begins the names of its metrics.
        micros: Micro-batches with a gradient; every rank has as many, some of them without rows.
        loss_of: Returns a micro-batch's share of the loss.
        weight: What the loss is multiplied by.
    """

    prefix: str
    micros: list[list[int]]
    loss_of: Callable[[list[int]], Tensor]
    weight: float = 1.0


class MiniBatch(NamedTuple):
    """The rows of this rank that an optimizer step trains on; ranks may have unequal numbers of rows, or none.

    Args:
        batch: The step's rows of this rank.
        rows: Indices of the rows of this mini-batch.
        noise: Noise on the embeddings of all rows of the batch, in passes with a gradient; None without.
        record: Whether the log-probs of this pass become `batch.trainer_logps`, since no phase has computed them.
    """

    batch: TrainBatch
    rows: list[int]
    noise: RowNoise | None = None
    record: bool = False


class Update(NamedTuple):
    """An optimizer step: the gradient's norm before clipping, and this rank's shares of losses, by their prefixes."""

    norm: Tensor
    losses: dict[str, float]


def update_models(
    data: Data, models: Models, service: RolloutService, scored: TrainingBatch, meter: Meter
) -> TrainBatch:
    """Take `epochs * minibatches` optimizer steps with the policy, and as many with the critic if there is one.

    The trainer's log-probs, if no phase before has computed them, are those of the first optimizer step.

    Returns:
        The batch that was trained on. Its log-probs are NaN in rows that no optimizer step has read.
    """
    recipe, policy, critic, step = data.recipe, models.policy, models.critic, scored.step
    policy_waits = recipe.critic is not None and step <= recipe.critic.policy_delay_steps
    record = scored.batch.trainer_logps is None
    batch = TrainBatch.of(scored.batch)
    mixtures = [] if policy_waits else mixed(data, models, service, scored, meter)
    recipes = [recipe, *(mixture.data.recipe for mixture in mixtures)]
    in_pool: list[Callable[[], PoolReply]] = []
    orders = [mini_batches(own.train, step, own.groups_per_step) for own in recipes]
    for number, (groups, *mixture_groups) in enumerate(zip(*orders, strict=True)):
        rows = rows_of(batch.group.tolist(), groups)
        if isinstance(critic, PlacedModel):
            in_pool.append(critic.ask("update", batch.rows(torch.tensor(rows).long()), rate=critic.rate))
        elif critic is not None:
            update_critic(data, critic, service.ranks, MiniBatch(batch, rows), meter)
        if not policy_waits:
            update = f"{step}/{number}"
            terms = []
            for mixture, own_groups in zip(mixtures, mixture_groups, strict=True):
                noise = embedding_noise(mixture.batch, mixture.data.recipe, update)
                mini_batch = MiniBatch(mixture.batch, rows_of(mixture.groups, own_groups), noise)
                terms.append(mixture_term(mixture, policy, service, mini_batch, meter))
            noise = embedding_noise(batch, recipe, update)
            update_policy(data, policy, service, MiniBatch(batch, rows, noise, record), meter, mixtures=terms)
            record = False
    for reply in in_pool:
        meter.add_sums(reply().sums)
    own_critic = None if isinstance(critic, PlacedModel) else critic
    trained = [module for module in (None if policy_waits else policy, own_critic) if module is not None]
    count_work(recipe, trained, batch, meter)
    for mixture in mixtures:
        if mixture.weight:
            count_work(mixture.data.recipe, [policy], mixture.batch, meter)
    packed, passes = policy.inner.passes.take_counts()
    meter.mean("update/packed", packed / max(passes, 1), weight=passes)
    differing, compared = policy.inner.passes.take_replayed()
    if compared:
        meter.mean("router/differs", differing / compared, weight=compared)
    return batch


def rows_of(groups: list[int], chosen: set[int]) -> list[int]:
    """Return the rows whose groups are among the chosen ones."""
    return [i for i, group in enumerate(groups) if group in chosen]


def mini_batches(train: Train, step: int, groups: int) -> Iterator[set[int]]:
    """Yield the groups of each mini-batch, of so many, the same on every rank."""
    for epoch in range(train.epochs):
        order = permutation(f"minibatches/{train.seed}/{step}/{epoch}", groups)
        for part in order.tensor_split(train.minibatches):
            yield set(part.tolist())


def embedding_noise(batch: TrainBatch, recipe: Recipe, update: str) -> RowNoise | None:
    """Return NEFTune's noise of each row in an optimizer step: uniform, up to alpha / sqrt(tokens * width)."""
    alpha = recipe.loss.forward.embedding_noise
    if not alpha:
        return None
    lengths = batch.attention.sum(-1)
    return RowNoise.of_rows(
        f"noise/{recipe.train.seed}/{update}", batch.tokens, lengths, batch.group, alpha / lengths.sqrt()
    )


def accumulate_and_step(module: TrainableModule[Any], terms: Sequence[Term]) -> Update:
    """Make one optimizer step over the micro-batches of all terms.

    A gradient that is not finite changes nothing, on every rank alike.
    """
    passes = [(term, micro) for term in terms for micro in term.micros] or [(terms[0], [])]
    losses = dict.fromkeys((term.prefix for term in terms), 0.0)
    for i, (term, micro) in enumerate(passes):
        with module.accumulating(more=i < len(passes) - 1):
            loss = term.loss_of(micro)
            losses[term.prefix] += loss.item() if micro else 0.0
            module.backward(loss * term.weight)
    norm = module.clip_gradients()
    if bool(torch.isfinite(norm)):
        module.optimizer.step()
    module.optimizer.zero_grad()
    return Update(norm, losses)


def log_update(update: Update, meter: Meter, prefix: str, ranks: int) -> None:
    """Log an optimizer step of the policy or the critic: losses are means over the optimizer steps of a step."""
    finite = float(torch.isfinite(update.norm))
    log_losses(update.losses, meter, ranks)
    meter.mean("grad_norm" if prefix == "policy" else f"{prefix}/grad_norm", update.norm)
    meter.count("update/not_finite", (1 - finite) / ranks)
    meter.count("update/steps" if prefix == "policy" else f"{prefix}/steps", finite / ranks)


def log_losses(losses: Mapping[str, float], meter: Meter, ranks: int) -> None:
    """Log this rank's shares of the losses of an optimizer step, by their prefixes."""
    for prefix, loss in losses.items():
        meter.mean(f"{prefix}/loss", loss * ranks)


def log_share(share: LossShare, batch: TrainBatch, meter: Meter, prefix: str) -> None:
    """Log the metrics of a micro-batch, which count by its number of chosen tokens or of rows."""
    tokens = float(batch.mask.sum())
    for name, value in share.metrics.items():
        meter.mean(f"{prefix}/{name}", value, weight=len(batch) if name in share.by_row else tokens)


def update_policy(
    data: Data,
    policy: TrainableModule[Actor],
    service: RolloutService,
    mini_batch: MiniBatch,
    meter: Meter,
    *,
    mixtures: Sequence[Term | None] = (),
) -> None:
    """Make one optimizer step of the policy; the terms of mixtures are added to the loss of the mini-batch."""
    ranks, own = service.ranks, policy_term(data, policy, service, mini_batch, meter)
    if own is None:
        meter.count("update/empty", 1 / ranks.count)
    terms = [term for term in (own, *mixtures) if term is not None]
    if terms:  # agreed: a term is None on all ranks
        log_update(accumulate_and_step(policy, terms), meter, "policy", ranks.count)


def mixture_term(
    mixture: Mixed, policy: TrainableModule[Actor], service: RolloutService, mini_batch: MiniBatch, meter: Meter
) -> Term | None:
    """Return the term of some rows of a mixture; one without a weight is only measured, here.

    Returns:
        None, on all ranks alike, if there is nothing to learn.
    """
    prefix = f"mix/{mixture.name}"
    term = policy_term(mixture.data, policy, service, mini_batch, meter, prefix=prefix)
    if term is None:
        return None
    if mixture.weight:
        return term._replace(weight=mixture.weight)
    with torch.no_grad():
        losses = [term.loss_of(micro).item() for micro in term.micros]
    log_losses({prefix: sum(losses)}, meter, service.ranks.count)
    return None


def policy_term(
    data: Data,
    policy: TrainableModule[Actor],
    service: RolloutService,
    mini_batch: MiniBatch,
    meter: Meter,
    *,
    prefix: str = "policy",
) -> Term | None:
    """Return the loss of a mini-batch, after computing the rows without a gradient, to log and record them.

    Returns:
        None if no rank has a token to learn from.
    """
    batch, rows, noise, record = mini_batch
    recipe, ranks = data.recipe, service.ranks
    objective = Objective.of(recipe, service.version, strict=service.version == 0)
    counts = objective.count_over_ranks(batch, rows, recipe.groups_per_step, ranks.all_reduce_sum)
    if counts.tokens == 0:
        return None
    if recipe.loss.selects:
        select_tokens(data, policy.inner, ranks, objective, mini_batch)
    vocabularies = data.vocabularies if recipe.loss.forward.teacher_top else None
    split = None if vocabularies is None else vocabularies.to(batch.tokens.device)[:2]

    def loss_of(micro: list[int]) -> Tensor:
        part, tokens, mask = select_rows(batch, micro)
        added = noise.rows(micro) if noise is not None and micro and torch.is_grad_enabled() else None
        router = bool(micro) and bool(recipe.train.router_aux_loss_coef)
        reads = restricted(recipe.loss.forward.statistics, part)._replace(router=router)
        if micro and recipe.loss.forward.teacher_top:
            reads = reads._replace(ids=part.teacher_top_ids)
            if split is not None:
                reads = reads._replace(top=recipe.loss.forward.teacher_top, split=split)
        temperature = recipe.rollout.sampling.temperature
        out: PolicyOutput = policy.module(tokens, mask, temperature, reads, noise=added, media=part.media)
        if not micro:
            return out.logps.sum()
        if record:
            record_logps(batch, micro, part, out.logps.detach())
        if batch.entropy is not None and out.entropy is not None:  # that of the first pass over a row stays
            before = batch.entropy[micro, : out.entropy.shape[1]]
            batch.entropy[micro, : out.entropy.shape[1]] = torch.where(before.isnan(), out.entropy.detach(), before)
        share = objective.share(out, part, counts)
        objective.check_gradient(share.loss)
        log_share(share, part, meter, prefix)
        return share.loss

    def divided(rows: list[int]) -> list[list[int]]:
        limit, packed = data.token_limit, policy.inner.passes.packs(batch.media) and noise is None
        groups = Inputs.GROUPS in recipe.loss.inputs
        return aligned_micro_batches(batch, rows, limit, ranks.all_reduce_max, packed, whole_groups=groups)

    taught = objective.rows_with_gradient(batch).tolist()
    with torch.no_grad():  # what others are logged and recorded for
        for micro in divided([i for i in rows if not taught[i]]):
            loss_of(micro)
    return Term(prefix, divided([i for i in rows if taught[i]]), loss_of)


def record_logps(batch: TrainBatch, rows: list[int], part: TrainBatch, logps: Tensor) -> None:
    """Keep the log-probs [b,t] of some rows as the trainer's, in the batch and in `part`, which was cut out of it.

    They are the old policy's too, unless ratios compare with the engine's.
    """
    batch.trainer_logps[rows] = torch.nn.functional.pad(logps, (0, batch.tokens.shape[1] - logps.shape[1]))
    part.trainer_logps = logps
    if batch.old_logps is batch.trainer_logps:
        part.old_logps = logps


def select_tokens(data: Data, actor: Actor, ranks: Ranks, objective: Objective, mini_batch: MiniBatch) -> None:
    """Set `batch.selected` [B,T] to the tokens that the loss treats apart among the rows of a mini-batch.

    With `record`, nothing has computed the old log-probs yet: those of this pass are the old policy's.
    """
    batch, rows, _, record = mini_batch
    loss = objective.loss
    part, _, _ = select_rows(batch, rows)
    [logps] = policy_logps(data, actor, ranks, part)
    if record:
        record_logps(batch, rows, part, logps)
    part = objective.with_old_logps(logps, part)
    with calling(loss, "select"):
        selected = loss.select(logps, part)
    require(loss, "select", outputs.of_selection(selected, part.mask))
    batch.selected = torch.zeros_like(batch.mask)
    batch.selected[rows, : selected.shape[1]] = selected


def update_critic(
    data: Passes, critic: TrainableModule[ValueModel], ranks: Ranks, mini_batch: MiniBatch, meter: Meter
) -> None:
    """Make one optimizer step of the critic."""
    batch, rows, *_ = mini_batch
    section, counts = data.recipe.critic, count_tokens(batch.mask[rows], ranks.all_reduce_sum)
    if section is None or counts.tokens == 0:
        return

    def loss_of(micro: list[int]) -> Tensor:
        part, tokens, mask = select_rows(batch, micro)
        values: Tensor = critic.module(tokens, mask, part.media)
        if not micro:
            return values.sum()
        share = value_share(values, part, counts.tokens, section.clip)
        log_share(share, part, meter, "critic")
        return share.loss

    limit, packed = data.token_limit, critic.inner.passes.packs(batch.media)
    micros = aligned_micro_batches(batch, rows, limit, ranks.all_reduce_max, packed)
    log_update(accumulate_and_step(critic, [Term("critic", micros, loss_of)]), meter, "critic", ranks.count)


def count_work(recipe: Recipe, trained: Sequence[TrainableModule[Any]], batch: TrainBatch, meter: Meter) -> None:
    """Log the tokens that were trained on, prompts included, and the operations of the update where they are known."""
    lengths = batch.attention.sum(-1)
    work = [module.flops(lengths, int(batch.mask.sum())) for module in trained]
    meter.count("update/tokens", float(lengths.sum()))
    if None not in work:
        meter.count("update/tflop", recipe.train.epochs * sum(x or 0.0 for x in work) / 1e12)

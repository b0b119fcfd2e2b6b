"""Learning from a batch: optimizer steps over micro-batches whose split changes nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlkit.loop.metrics import Meter
from rlkit.loop.run import Run
from rlkit.ops import aggregate, kl
from rlkit.ops.batching import micro_batches
from rlkit.ops.masked import masked_mean, masked_sum
from rlkit.types import Batch, LossOutput, PolicyOutput


class Counts(NamedTuple):
    """What a mini-batch has over all ranks: the only numbers that a loss is divided by."""

    tokens: Tensor
    sequences: Tensor


def learn(run: Run, batch: Batch, number: int, meter: Meter) -> None:
    """Take `epochs * minibatches` optimizer steps; fills `batch.old_logps` if the step is on-policy."""
    if batch.old_logps is None:
        batch.old_logps = torch.zeros_like(batch.rollout_logps)
    for groups in mini_batches(run, number):
        rows = [i for i, group in enumerate(batch.group.tolist()) if group in groups]
        update(run, batch, rows, meter)


def mini_batches(run: Run, number: int) -> Iterator[set[int]]:
    """Give the groups of each mini-batch, the same on every rank."""
    train = run.recipe.train
    for epoch in range(train.epochs):
        digest = hashlib.blake2b(f"minibatches/{train.seed}/{number}/{epoch}".encode(), digest_size=6).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        order = torch.randperm(train.prompts_per_step, generator=generator)
        for part in order.tensor_split(train.minibatches):
            yield set(part.tolist())


def update(run: Run, batch: Batch, rows: Sequence[int], meter: Meter) -> None:
    """Make one optimizer step from the rows of this rank; ranks may have different numbers of rows, or none.

    A gradient that is not finite is counted and left out, on every rank alike.
    """
    train = run.recipe.train
    mine = batch.mask[rows]
    totals = run.reduce(torch.stack((mine.sum(), mine.any(-1).sum())).float())
    if totals[0] == 0:
        meter.count("update/empty", 1)
        return
    lengths: list[int] = batch.attention[rows].sum(-1).tolist()
    micros = [[rows[i] for i in part] for part in micro_batches(lengths, train.micro_tokens)]
    rounds = int(run.largest(len(micros)))
    micros += [[]] * (rounds - len(micros))
    for i, micro in enumerate(micros):
        with run.fabric.no_backward_sync(run.module, enabled=i < rounds - 1):
            loss = micro_loss(run, batch, micro, Counts(totals[0], totals[1]), meter)
            run.fabric.backward(loss * run.fabric.world_size)
    norm = run.fabric.clip_gradients(run.module, run.optimizer, max_norm=train.max_norm, error_if_nonfinite=False)
    assert norm is not None
    if bool(torch.isfinite(norm)):
        run.optimizer.step()
    else:
        meter.count("update/not_finite", 1 / run.fabric.world_size)
    run.optimizer.zero_grad()
    meter.mean("grad_norm", norm)


def micro_loss(run: Run, batch: Batch, rows: Sequence[int], counts: Counts, meter: Meter) -> Tensor:
    """Give a micro-batch's share of the mini-batch's loss; 0, yet with a graph, for one without rows."""
    recipe = run.recipe
    part = batch.rows(torch.tensor(rows, dtype=torch.long, device=run.device))
    tokens, mask = part.tokens, part.mask
    if not rows:
        tokens, mask = (x.new_zeros(1, 2) for x in (tokens, mask))
    out: PolicyOutput = run.module(tokens, mask, recipe.rollout.sampling.temperature)
    if not rows:
        return out.logps.sum()
    if recipe.train.on_policy:
        assert batch.old_logps is not None
        part.old_logps = out.logps.detach()
        batch.old_logps[list(rows), : tokens.shape[1]] = part.old_logps
    result = recipe.loss(out, part)
    weights = aggregate.weights(
        mask,
        recipe.train.aggregation or recipe.loss.aggregation,
        tokens=counts.tokens,
        sequences=counts.sequences,
        budget=recipe.rollout.sampling.max_tokens,
    )
    per_token, figures = add_terms(run, result, out, part)
    loss = masked_sum(per_token * weights, mask)
    meter.count("policy/loss", float(loss.detach()))
    for name, value in figures.items():
        meter.mean(f"policy/{name}", value, weight=float(mask.sum()))
    return loss


def add_terms(run: Run, result: LossOutput, out: PolicyOutput, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Add the recipe's entropy and KL terms to the policy loss, token by token."""
    recipe = run.recipe
    per_token, figures = result.per_token, dict(result.metrics)
    if out.entropy is not None:
        figures["entropy"] = masked_mean(out.entropy.detach(), batch.mask)
        if recipe.train.entropy_coef:
            per_token = per_token - recipe.train.entropy_coef * out.entropy
    if recipe.kl_loss is not None and batch.ref_logps is not None:
        divergence = kl.estimate(out.logps, batch.ref_logps, recipe.kl_loss.kind)
        figures["kl_ref"] = masked_mean(divergence.detach(), batch.mask)
        per_token = per_token + recipe.kl_loss.coef * divergence
    return per_token, figures

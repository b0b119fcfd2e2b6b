"""Judging a batch before the policy learns from it: log-probs, values, corrections; rewards may still be missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlkit.loop.metrics import Meter
from rlkit.loop.run import Run
from rlkit.ops import correction
from rlkit.ops.batching import micro_batches
from rlkit.ops.masked import masked_mean
from rlkit.types import Batch, PolicyOutput


@torch.no_grad()
def judge(run: Run, batch: Batch) -> None:
    """Fill what the recipe needs of `trainer_logps`, `old_logps`, `ref_logps` and `values`; rewards may be missing."""
    recipe = run.recipe
    if recipe.needs_old_logps:
        out = policy_logps(run, batch)
        batch.trainer_logps, batch.sum_pi_squared = out.logps, out.sum_pi_squared
        batch.old_logps = out.logps
    if recipe.train.old_logps == "rollout":
        batch.old_logps = batch.rollout_logps
    if (reference := run.reference) is not None:
        temperature = recipe.rollout.sampling.temperature
        [batch.ref_logps] = piecewise(run, batch, lambda p: (reference.logps(p.tokens, p.mask, temperature),))
    if run.critic is not None:
        [batch.values] = piecewise(run, batch, lambda p: (run.value_model(p.tokens, p.mask),))


def correct(run: Run, batch: Batch, meter: Meter) -> None:
    """Weigh or reject tokens by the gap between engine and trainer."""
    weigh, reject = run.recipe.correction, run.recipe.rejection
    if batch.trainer_logps is None:
        return
    both = (batch.trainer_logps, batch.rollout_logps, batch.mask)
    if weigh is not None:
        batch.correction_weights = correction.importance_weights(
            *both, level=weigh.level, low=weigh.low, high=weigh.high
        )
        mean = masked_mean(batch.correction_weights, batch.mask, run.reduce)
        meter.max("correction/weight_mean", mean)
    if reject is not None:
        batch.accepted = correction.accepted(
            *both, statistic=reject.statistic, level=reject.level, low=reject.low, high=reject.high
        )
        meter.max("correction/rejected", 1 - masked_mean(batch.accepted, batch.mask, run.reduce))


@torch.no_grad()
def piecewise(run: Run, batch: Batch, compute: Callable[[Batch], Sequence[Tensor]], count: int = 1) -> list[Tensor]:
    """Compute `count` tensors [B,T] f32 over micro-batches, in the trainer's precision."""
    found = [torch.zeros_like(batch.rollout_logps) for _ in range(count)]
    lengths: list[int] = batch.attention.sum(-1).tolist()
    for rows in micro_batches(lengths, run.recipe.train.micro_tokens):
        with run.autocast():
            pieces = compute(batch.rows(torch.tensor(rows, device=run.device)))
        for whole, piece in zip(found, pieces, strict=True):
            whole[rows, : piece.shape[1]] = piece
    return found


def policy_logps(run: Run, batch: Batch) -> PolicyOutput:
    """Give the current policy's log-probs, entropies and sums of squares, each [B,T] f32."""
    temperature = run.recipe.rollout.sampling.temperature
    return PolicyOutput(*piecewise(run, batch, lambda p: run.actor(p.tokens, p.mask, temperature), count=3))


def measure_gap(run: Run, batch: Batch, meter: Meter) -> None:
    """Log how far the trainer's log-probs are from the engine's; every rank must call this."""
    assert batch.trainer_logps is not None
    known = batch.mask & ~batch.trainer_logps.isnan()
    difference = (batch.trainer_logps - batch.rollout_logps)[known].abs()
    if len(difference):
        meter.mean("mismatch/mean", difference.mean(), weight=len(difference))
        meter.max("mismatch/max", difference.max())
    figures = correction.gap(batch.trainer_logps, batch.rollout_logps, known, run.reduce)
    for name, value in figures._asdict().items():
        meter.max(f"mismatch/{name}", value)

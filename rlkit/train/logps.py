"""Judging a batch before the policy learns from it: log-probs, values, corrections; rewards may still be missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlkit.ops import correction
from rlkit.ops.batching import micro_batches
from rlkit.ops.masked import masked_mean
from rlkit.train.metrics import Meter
from rlkit.train.run import Run
from rlkit.types import Batch, PolicyOutput


@torch.no_grad()
def compute_logps(run: Run, batch: Batch) -> None:
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
        [batch.ref_logps] = forward_in_micro_batches(
            run, batch, lambda tokens, mask: (reference.logps(tokens, mask, temperature),)
        )
    if run.critic is not None:
        [batch.values] = forward_in_micro_batches(run, batch, lambda tokens, mask: (run.value_model(tokens, mask),))


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
def forward_in_micro_batches(
    run: Run, batch: Batch, compute: Callable[[Tensor, Tensor], Sequence[Tensor]], count: int = 1
) -> list[Tensor]:
    """Compute `count` tensors [B,T] f32 from tokens and mask over micro-batches, in the trainer's precision.

    Ranks make the same number of passes.
    """
    found = [torch.zeros_like(batch.rollout_logps) for _ in range(count)]
    for rows in aligned_micro_batches(run, batch, range(len(batch))):
        _, tokens, mask = select_rows(run, batch, rows)
        with run.autocast():
            pieces = compute(tokens, mask)
        for whole, piece in zip(found, pieces if rows else (), strict=bool(rows)):
            whole[rows, : piece.shape[1]] = piece
    return found


def aligned_micro_batches(run: Run, batch: Batch, rows: Sequence[int]) -> list[list[int]]:
    """Divide rows into micro-batches, as many on every rank: some ranks make their last passes without rows."""
    lengths: list[int] = batch.attention[list(rows)].sum(-1).tolist()
    micros = [[rows[i] for i in part] for part in micro_batches(lengths, run.recipe.train.max_tokens_per_micro_batch)]
    return micros + [[]] * (int(run.ranks.all_reduce_max(len(micros))) - len(micros))


def select_rows(run: Run, batch: Batch, rows: Sequence[int]) -> tuple[Batch, Tensor, Tensor]:
    """Return some rows with their tokens and mask; for no rows, tokens that keep a sharded module's ranks in step."""
    part = batch.rows(torch.tensor(rows, dtype=torch.long, device=run.device))
    if rows:
        return part, part.tokens, part.mask
    return part, part.tokens.new_zeros(1, 2), part.mask.new_zeros(1, 2)


def policy_logps(run: Run, batch: Batch) -> PolicyOutput:
    """Return the current policy's log-probs, entropies and sums of squares, each [B,T] f32."""
    temperature = run.recipe.rollout.sampling.temperature
    return PolicyOutput(
        *forward_in_micro_batches(run, batch, lambda tokens, mask: run.actor(tokens, mask, temperature), count=3)
    )


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

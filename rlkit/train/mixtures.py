"""What a step's mixtures learn from."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from rlkit.rollout.collate import add_rewards, collate
from rlkit.train.credit import estimate
from rlkit.train.logps import compute_logps
from rlkit.train.metrics import Meter
from rlkit.train.rollouts import recorded
from rlkit.train.setup import TrainContext
from rlkit.types import Batch, TrainBatch


class Mixed(NamedTuple):
    """A mixture's rows of a step on this rank.

    Args:
        name: The mixture's.
        weight: What its loss is multiplied by.
        context: The run's, with the mixture's recipe and data.
        batch: The rows.
        groups: The group of each row, whole ones of which are in a mini-batch.
    """

    name: str
    weight: float
    context: TrainContext
    batch: TrainBatch
    groups: list[int]


def mixed(context: TrainContext, scored: Batch, number: int, meter: Meter) -> list[Mixed]:
    """Return the batches of a step's mixtures; all ranks must call this.

    Args:
        context: The run's.
        scored: The step's own rows.
        number: The step's.
        meter: Takes the metrics.
    """
    mixtures = []
    for name, mixture in (context.recipe.mix or {}).items():
        data = context.data.mixtures[name]
        mixture_context = replace(context, recipe=data.recipe, data=data)
        batch = recorded_rows(mixture_context, number) if mixture.task is not None else answers_to_policy(scored)
        groups = (scored if mixture.task is None else batch).group.tolist()
        meter.count(f"mix/{name}/tokens", float(batch.mask.sum()))
        mixtures.append(Mixed(name, mixture.weight, mixture_context, batch, groups))
    return mixtures


def recorded_rows(context: TrainContext, number: int) -> TrainBatch:
    """Return a step's recorded completions of this rank; all ranks must call this."""
    rows = recorded(context.data, context.rollouts, number, Meter()).train_on
    batch = collate(rows).to(context.device)
    compute_logps(context, batch)
    scored = add_rewards(batch, rows)
    estimate(None, scored)
    return TrainBatch.of(scored)


def answers_to_policy(scored: Batch) -> TrainBatch:
    """Return the same rows with a mask of what the policy did not choose after its first turn.

    Each is a group of its own: what is before its first token under this mask, no other row of its prompt shares.
    """
    mask = scored.attention & ~scored.mask & (scored.mask.cumsum(-1) > 0)
    batch = replace(
        scored,
        mask=mask,
        group=torch.arange(len(scored), device=mask.device),
        trainer_logps=None,
        old_logps=None,
        correction_weights=None,
        accepted=None,
        advantages=torch.zeros_like(scored.token_rewards),
    )
    return TrainBatch.of(batch)

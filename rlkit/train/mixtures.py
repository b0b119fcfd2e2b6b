"""What a step's mixtures learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from rlkit.data.data import Data
from rlkit.interfaces.callback import TrainingBatch
from rlkit.rollout.collate import add_rewards, collate
from rlkit.rollout.service import RolloutService
from rlkit.train.credit import estimate
from rlkit.train.logps import compute_logps
from rlkit.train.metrics import Meter
from rlkit.train.models import Models
from rlkit.train.rollouts import recorded_answers
from rlkit.train.teacher import compute_teacher_logps
from rlkit.types import Batch, Prompt, TrainBatch


class Mixed(NamedTuple):
    """A mixture's rows of a step on this rank.

    Args:
        name: The mixture's.
        weight: What its loss is multiplied by.
        data: The mixture's, with its recipe.
        batch: The rows.
        groups: The group of each row, whole ones of which are in a mini-batch.
    """

    name: str
    weight: float
    data: Data
    batch: TrainBatch
    groups: list[int]


def mixed(data: Data, models: Models, service: RolloutService, step: TrainingBatch, meter: Meter) -> list[Mixed]:
    """Return the batches of a step's mixtures; all ranks must call this.

    Args:
        data: The run's, with those of the mixtures.
        models: Compute what a mixture's loss reads.
        service: Says which rows are this rank's.
        step: The step's number and its own rows.
        meter: Takes the metrics.
    """
    mixtures = []
    for name, mixture in (data.recipe.mix or {}).items():
        own, recorded_here = data.mixtures[name], mixture.task is not None
        if recorded_here:
            batch = recorded_rows(own, models, service, own.prompts(step.step))
        else:
            batch = answers_to_policy(step.batch)
        groups = (batch if recorded_here else step.batch).group.tolist()
        meter.count(f"mix/{name}/tokens", float(batch.mask.sum()))
        mixtures.append(Mixed(name, mixture.weight, own, batch, groups))
    return mixtures


def recorded_rows(
    data: Data, models: Models, service: RolloutService, prompts: Sequence[tuple[int, Prompt]]
) -> TrainBatch:
    """Return the recorded completions of prompts on this rank, as the loss reads them; all ranks must call this."""
    rows = recorded_answers(data, service, prompts, Meter()).train_on
    batch = collate(rows).to(service.ranks.fabric.device)
    compute_logps(data, models, service.ranks, batch)
    if data.recipe.teacher is not None:  # agreed: from the recipe; a mixture has none
        compute_teacher_logps(data, models, service, batch, rows)
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

"""A teacher's log-probs of the policy's own tokens, or of those that it finds most likely in their places."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlkit.engines.sglang.teacher import Span, served_logps
from rlkit.train.data import Data
from rlkit.train.distill.rows import TeacherRows, teacher_rows
from rlkit.train.logps import frozen_logps, frozen_top
from rlkit.train.setup import TrainContext
from rlkit.types import RolloutBatch, Trajectory


def compute_teacher_logps(context: TrainContext, batch: RolloutBatch, trajectories: Sequence[Trajectory]) -> None:
    """Fill `batch.teacher_logps`, or what a loss with `teacher_top` reads instead; every rank must call this.

    Args:
        context: The run's.
        batch: Of these trajectories, with the policy's own tokens.
        trajectories: In its order.

    Raises:
        EngineError: The teacher's servers do not answer.
    """
    rows = read_rows(context.data, batch, trajectories)
    teacher, count = context.models.teacher, context.recipe.loss.teacher_top
    if count and teacher is not None:  # agreed: options of the recipe
        ids, logps = frozen_top(context, rows.batch, teacher, count)
        batch.teacher_top_ids, batch.teacher_top_logps = rows.restore(ids), rows.restore(logps)
        return
    # agreed: an option of the recipe
    found = _served(context, rows.batch) if teacher is None else frozen_logps(context, rows.batch, teacher)
    batch.teacher_logps = rows.restore(found)


def check_servers(context: TrainContext) -> None:
    """Have each of the teacher's servers score a prompt, before anything is spent.

    Raises:
        EngineError: One does not.
    """
    section, data = context.recipe.teacher, context.data
    if section is None or data.teacher_prompts is None:
        return
    for url in section.urls or () if context.ranks.lead else ():
        prompt = data.teacher_prompts.prompt(data.prompt(data.kept[0]))
        context.rollouts.wait(served_logps([url], [Span(data.template.start(prompt.messages, prompt.tools), 1)]))


def _served(context: TrainContext, batch: RolloutBatch) -> Tensor:
    """Return the log-probs [B,T] f32 of the recipe's teacher, which servers have."""
    section, ranks, mask = context.recipe.teacher, context.ranks, batch.mask.cpu()
    assert section is not None
    assert section.urls is not None
    rows = mask.any(-1).nonzero().flatten().tolist()
    starts, lengths = mask.int().argmax(-1).tolist(), batch.attention.sum(-1).tolist()
    spans = [Span(batch.tokens[row, : lengths[row]].tolist(), starts[row]) for row in rows]
    answers = context.rollouts.wait(served_logps(section.urls, spans)) if ranks.lead else []
    found = torch.zeros(mask.shape)
    for row, span, logps in zip(rows, spans, ranks.broadcast_tp(answers), strict=True):
        found[row, span.start : span.start + len(logps)] = torch.tensor(logps)
    return (found * mask).to(batch.tokens.device)


def read_rows(data: Data, batch: RolloutBatch, trajectories: Sequence[Trajectory]) -> TeacherRows:
    """Return a batch as the recipe's teacher reads it."""
    prompts = data.teacher_prompts
    if prompts is None or not (prompts.changed or batch.tokens.shape[1] > prompts.context):
        return TeacherRows(batch, batch.mask, batch.mask)
    starts = [prompts.start(data.template, trajectory) for trajectory in trajectories]
    return teacher_rows(batch, trajectories, starts, prompts.context)

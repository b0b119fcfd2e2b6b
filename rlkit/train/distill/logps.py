"""Teachers' log-probs of the policy's own tokens, or of those that they find most likely in their places."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlkit.data.data import Data
from rlkit.engines import connect_teacher
from rlkit.interfaces.teacher import TokenSpan
from rlkit.ops.masked import masked_sum
from rlkit.sections import Teacher
from rlkit.train.describe import source_of
from rlkit.train.distill.rows import TeacherRows, teacher_rows
from rlkit.train.distill.servers import logps_on_servers, top_on_servers
from rlkit.train.logps import frozen_logps, frozen_top
from rlkit.train.metrics import Meter
from rlkit.train.setup import TrainContext
from rlkit.types import Batch, RolloutBatch, Trajectory


def compute_teacher_logps(context: TrainContext, batch: RolloutBatch, trajectories: Sequence[Trajectory]) -> None:
    """Fill `batch.teacher_logps`, or what a loss with `forward.teacher_top` reads instead, if the recipe has a teacher.

    Each row is read by the teacher of its source. All ranks must call this.

    Args:
        context: Parts of the run on this rank.
        batch: Of these trajectories, with the policy's own tokens.
        trajectories: In its order.

    Raises:
        EngineError: The teacher's servers do not answer.
    """
    section = context.recipe.teacher
    if section is None:
        return
    rows = read_rows(context.data, batch, trajectories)
    tensors: list[Tensor] = []
    paths = [section.path_of(t.prompt.source_name) for t in trajectories]
    teacher_top = context.recipe.loss.forward.teacher_top
    prompts = context.data.teacher_prompts
    count = teacher_top if prompts is None else min(teacher_top, prompts.columns)
    for path, teacher in context.models.teachers.items():
        indices = torch.tensor(
            [i for i, row_path in enumerate(paths) if row_path == path], device=batch.tokens.device
        ).long()
        part = rows.batch.rows(indices)
        if teacher is None:
            pieces = top_on_servers(context, part, count) if count else [logps_on_servers(context, part)]
        else:
            pieces = frozen_top(context, part, teacher, count) if count else [frozen_logps(context, part, teacher)]
        tensors = tensors or [_unread(piece, rows.batch.tokens) for piece in pieces]
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor[indices, : piece.shape[1]] = piece
    if count:
        batch.teacher_top_ids, batch.teacher_top_logps = map(rows.restore, tensors)
    else:
        [batch.teacher_logps] = map(rows.restore, tensors)


def _unread(like: Tensor, tokens: Tensor) -> Tensor:
    """Return a tensor for all rows of what is computed of some: NaN, or 0 for integers."""
    return like.new_full((*tokens.shape, *like.shape[2:]), torch.nan if like.is_floating_point() else 0)


def log_by_teacher(section: Teacher, batch: Batch, trajectories: Sequence[Trajectory], meter: Meter) -> None:
    """Log the KL to the teachers of sources, each over the tokens of its own prompts."""
    if batch.teacher_logps is None:  # the loss reads distributions instead
        return
    gap = batch.required("trainer_logps") - batch.teacher_logps
    is_read = batch.mask & ~gap.isnan()
    totals, counts = masked_sum(gap, is_read, dim=-1).tolist(), is_read.sum(-1).tolist()
    for trajectory, total, count in zip(trajectories, totals, counts, strict=True):
        if trajectory.prompt.source_name in (section.sources or ()):
            meter.mean(f"teacher/kl/{source_of(trajectory.prompt)}", total / max(count, 1), weight=count)


def check_servers(context: TrainContext) -> None:
    """Have each of the teacher's servers score a prompt, before anything is spent.

    Raises:
        EngineError: One does not.
    """
    section, data = context.recipe.teacher, context.data
    if section is None or section.urls is None or data.teacher_prompts is None or not context.ranks.lead:
        return
    prompt = data.teacher_prompts.prompt(data.prompt(data.order.rows[0]))
    span = TokenSpan(data.dialogue.template.start(prompt.messages, prompt.tools), 1)
    for url in section.urls:
        context.rollouts.wait(connect_teacher([url]).logps([span]))


def read_rows(data: Data, batch: RolloutBatch, trajectories: Sequence[Trajectory]) -> TeacherRows:
    """Return a batch as the recipe's teachers read it."""
    prompts = data.teacher_prompts
    if prompts is None or not (prompts.changed or batch.tokens.shape[1] > prompts.context):
        return TeacherRows(batch, batch.mask, batch.mask)
    starts = [prompts.start(data.dialogue.template, trajectory) for trajectory in trajectories]
    return teacher_rows(batch, trajectories, starts, prompts.context)

"""A teacher's log-probs of the policy's own tokens."""

from __future__ import annotations

from collections.abc import Sequence

from rlkit.models.reference import FrozenPolicy
from rlkit.train.data import Data
from rlkit.train.distill.rows import TeacherRows, teacher_rows
from rlkit.train.logps import frozen_logps
from rlkit.train.setup import TrainContext
from rlkit.types import RolloutBatch, Trajectory


def compute_teacher_logps(
    context: TrainContext, teacher: FrozenPolicy, batch: RolloutBatch, trajectories: Sequence[Trajectory]
) -> None:
    """Fill `batch.teacher_logps`; every rank must call this.

    Args:
        context: The run's.
        teacher: Whose log-probs they are.
        batch: Of these trajectories, with the policy's own tokens.
        trajectories: In its order.
    """
    rows = read_rows(context.data, batch, trajectories)
    batch.teacher_logps = rows.restore(frozen_logps(context, rows.batch, teacher))


def read_rows(data: Data, batch: RolloutBatch, trajectories: Sequence[Trajectory]) -> TeacherRows:
    """Return a batch as the recipe's teacher reads it."""
    prompts = data.teacher_prompts
    if prompts is None or not (prompts.changed or batch.tokens.shape[1] > prompts.context):
        return TeacherRows(batch, batch.mask, batch.mask)
    starts = [prompts.start(data.template, trajectory) for trajectory in trajectories]
    return teacher_rows(batch, trajectories, starts, prompts.context)

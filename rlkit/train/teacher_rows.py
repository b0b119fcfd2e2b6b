"""What a teacher reads: the policy's tokens after a prompt of its own, and the way back into the policy's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import nan

import torch
from torch import Tensor

from rlkit.rollout.collate import collate
from rlkit.types import RolloutBatch, Trajectory


@dataclass(frozen=True)
class TeacherRows:
    """A batch as a teacher reads it.

    Args:
        batch: [B,T'] Its rows, with all tokens after the first prompt as the policy has them.
        mask: [B,T] bool, the policy's tokens in the policy's own rows.
        read: [B,T] bool, those of them that are in `batch`, in the same order; the others are beyond the teacher's
            context.
    """

    batch: RolloutBatch
    mask: Tensor
    read: Tensor

    def restore(self, computed: Tensor) -> Tensor:
        """Return what was computed of the teacher's tokens [B,T',...] in the places of the policy's [B,T,...].

        It is 0 outside the mask, and where the teacher has not read a token NaN; 0 for integers.
        """
        restored = computed.new_zeros((*self.mask.shape, *computed.shape[2:]))
        if restored.is_floating_point():
            restored[self.mask] = nan
        restored[self.read] = computed[self.batch.mask]
        return restored


def teacher_rows(
    batch: RolloutBatch, trajectories: Sequence[Trajectory], starts: Sequence[Sequence[int]], context: int
) -> TeacherRows:
    """Return a batch with another start of each row, in place of all before the policy's first token.

    Args:
        batch: Of these trajectories.
        trajectories: In its order.
        starts: The ids with which the teacher's rows start.
        context: Tokens of the longest row that the teacher reads; others lose their end.
    """
    rows, ends = [], []
    for trajectory, start in zip(trajectories, starts, strict=True):
        first = trajectory.mask.index(True) if True in trajectory.mask else len(trajectory.mask)
        end = first + max(context - len(start), 0)
        tokens = [*start, *trajectory.tokens[first:end]]
        mask = [False] * len(start) + trajectory.mask[first:end]
        count = len(tokens)
        rows.append(replace(trajectory, tokens=tokens, mask=mask, logps=[0.0] * count, versions=[0] * count))
        ends.append(end)
    positions, limits = torch.arange(batch.mask.shape[1]), torch.tensor(ends, dtype=torch.long)
    read = batch.mask & (positions < limits[:, None]).to(batch.mask.device)
    return TeacherRows(collate(rows).to(batch.tokens.device), batch.mask, read)

"""An advantage for the best of a group."""

from __future__ import annotations

from typing import ClassVar

import torch

from rlkit.interfaces.advantage import AdvantageEstimator, Needs
from rlkit.ops.groups import group_stats
from rlkit.types import Batch


class PassK(AdvantageEstimator):
    """A = R - the group's second-best reward for the best sample of a group, 0 for all other samples and for ties.

    k is the size of the group.

    Source: verl's `grpo_passk`, after Tang et al. 2025 (arXiv:2503.19595).

    Args:
        scale_by_std: Whether to divide by the group's sample standard deviation + 1e-6.
    """

    needs: ClassVar[Needs] = Needs.GROUPS

    def __init__(self, scale_by_std: bool = True) -> None:
        self.scale_by_std = scale_by_std

    def explain(self) -> str:
        scale = " / (std_group + 1e-6)" if self.scale_by_std else ""
        return f"A = (R_best - R_second){scale} for the best of the group, else 0"

    def estimate(self, batch: Batch) -> None:
        outcomes = batch.outcomes()
        stats = group_stats(outcomes, batch.group)
        advantage = torch.zeros_like(outcomes)
        for group in batch.group.unique():  # type: ignore[no-untyped-call]
            [rows] = torch.where(batch.group == group)
            if len(rows) > 1:
                best, second = outcomes[rows].topk(2).values
                winner = rows[outcomes[rows].argmax()]
                advantage[winner] = best - second
        if self.scale_by_std:
            advantage = advantage / (stats.std + 1e-6)
        batch.advantages = advantage[:, None] * batch.mask

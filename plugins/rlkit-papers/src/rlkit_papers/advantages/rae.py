"""Role-conditioned advantage estimation, for self-play."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from rlkit.base.ranges import ShareBelowOne
from rlkit.interfaces.advantage import AdvantageEstimator, Needs
from rlkit.types import Batch


class RAE(AdvantageEstimator):
    """A = R - b, where b is a moving average of the returns of the same role and source of prompts in earlier steps.

    b begins at 0. The n returns of a step update it n times with their mean: b <- decay^n b + (1 - decay^n) mean R,
    which no order of the rows changes. Checkpoints hold b. Source: Liu et al. 2025 (arXiv:2506.24119), SPIRAL, whose
    code also subtracts b as it was before the update, since R is independent of it.

    Args:
        decay: Weight of the earlier average at each return.
    """

    needs: ClassVar[Needs] = Needs.ROLES
    formula: ClassVar[str] = "A = R - b_role, b_role <- {decay}^n b_role + (1 - {decay}^n) mean_role(R)"

    def __init__(self, decay: ShareBelowOne = 0.95) -> None:
        self.decay = decay
        self._baselines: dict[str, float] = {}

    def estimate(self, batch: Batch) -> None:
        role, names, outcomes = batch.required("role"), batch.role_names, batch.outcomes()
        baselines = outcomes.new_tensor([self._baselines.get(name, 0.0) for name in names])
        batch.advantages = (outcomes - baselines[role])[:, None] * batch.mask
        batch.metrics = {f"baseline/{name}": value for name, value in zip(names, baselines.tolist(), strict=True)}
        rows = torch.stack((torch.ones_like(outcomes), outcomes)).double()  # [2,B]
        counts, totals = self.reduce(rows.new_zeros(2, len(names)).index_add(1, role, rows)).tolist()
        for name, count, total in zip(names, counts, totals, strict=True):
            retained = self.decay**count
            mean = total / max(count, 1)
            self._baselines[name] = retained * self._baselines.get(name, 0.0) + (1 - retained) * mean

    def state_dict(self) -> dict[str, float]:
        return dict(self._baselines)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._baselines = dict(state)

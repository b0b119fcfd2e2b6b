"""The plain policy gradient."""

from __future__ import annotations

from typing import ClassVar

from rlkit.interfaces.loss import PolicyLoss
from rlkit.types import LossOutput, PolicyOutput, TrainBatch


class PolicyGradient(PolicyLoss):
    """-A logps, token by token; on-policy its gradient is that of every ratio loss.

    Source: Williams 1992 (REINFORCE).
    """

    zero_without_advantage: ClassVar[bool] = True
    compares: ClassVar[bool] = False
    formula: ClassVar[str] = "-A logp"

    def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
        return LossOutput(-batch.advantages * out.logps, {})

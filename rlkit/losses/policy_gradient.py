"""The plain policy gradient."""

from __future__ import annotations

from typing import ClassVar

from rlkit.interfaces.loss import AdvantageLoss, Inputs
from rlkit.types import LossOutput, PolicyOutput, TrainBatch


class PolicyGradient(AdvantageLoss):
    """-A logps, token by token; on-policy its gradient is that of every ratio loss.

    Source: Williams 1992 (REINFORCE).
    """

    inputs: ClassVar[Inputs] = Inputs.ADVANTAGES | Inputs.REWARDS
    formula: ClassVar[str] = "-A logp"

    def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
        return LossOutput(-batch.advantages * out.logps, {})

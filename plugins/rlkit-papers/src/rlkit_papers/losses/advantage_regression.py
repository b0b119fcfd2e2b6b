"""The least-squares loss of A*-PO."""

from __future__ import annotations

from typing import ClassVar

from rlkit.base.ranges import PositiveFloat
from rlkit.interfaces.loss import Inputs, SequenceLoss, SequenceOutput
from rlkit.ops.masked import last_of, masked_sum
from rlkit.types import PolicyOutput, TrainBatch


class AdvantageRegression(SequenceLoss):
    """(beta d - A)^2, where d is log pi - log pi_ref summed over a sequence: the log-ratio is regressed on A.

    The optimal policy under a KL penalty of strength beta has beta d = A*, the advantage `OptimalAdvantage`. Source:
    Brantley et al. 2025 (arXiv:2505.20686), stage 2 of A*-PO. The advantage is read at the last token.

    Metrics: `log_ratio` is the mean of d.

    Args:
        beta: beta_2 of the paper: how closely the policy is held to the reference.
    """

    inputs: ClassVar[Inputs] = SequenceLoss.inputs | Inputs.ADVANTAGES | Inputs.REFERENCE
    formula: ClassVar[str] = "({beta} d - A)^2, d = sum_t(logp - ref_logp)"

    def __init__(self, beta: PositiveFloat = 1e-3) -> None:
        self.beta = beta

    def per_sequence(self, out: PolicyOutput, batch: TrainBatch) -> SequenceOutput:
        log_ratio = masked_sum(out.logps - batch.required("ref_logps"), batch.mask, -1)
        loss = (self.beta * log_ratio - last_of(batch.advantages, batch.mask)).square()
        return SequenceOutput(loss, {"log_ratio": log_ratio.detach().mean()})

"""Kahneman-Tversky optimization's loss."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rlkit.base.ranges import FiniteFloat, NonNegativeFloat, PositiveFloat
from rlkit.interfaces.loss import Inputs, SequenceLoss, SequenceOutput
from rlkit.ops.masked import masked_sum
from rlkit.types import PolicyOutput, TrainBatch


class KTO(SequenceLoss):
    """w (1 - sigmoid(beta (d - z))) of a desirable row, w (1 - sigmoid(beta (z - d))) of another: no pairs needed.

    d is log pi - log pi_ref summed over a row's tokens, z its mean over the mini-batch (all ranks), at least 0 and
    without a gradient. Source: Ethayarajh et al. 2024 (arXiv:2402.01306), equation 8. There z is the mean of d over
    answers that are paired with other prompts of the batch, an estimate of the divergence from the reference; here it
    is that of the answers themselves, without bias where the policy has sampled them. Either needs a pass without a
    gradient before a mini-batch is learned from. Log-probs are at the temperature of the rollout.

    Metrics: `margin` is beta (d - z), with its sign changed in rows that are not desirable, `preference_accuracy` the
    share of rows with a positive one, and `baseline` is z.

    Args:
        beta: How closely the policy is held to the reference.
        threshold: Rows whose reward is above this are desirable.
        desirable_weight: w of desirable rows. As a rule, each kind's weight times its rows shall be about equal.
        undesirable_weight: w of other rows.
    """

    inputs: ClassVar[Inputs] = SequenceLoss.inputs | Inputs.REFERENCE
    formula: ClassVar[str] = (
        "{desirable_weight} (1 - sigmoid({beta} (d - z))) if R > {threshold} else "
        "{undesirable_weight} (1 - sigmoid({beta} (z - d))), d = sum_t(logp - ref_logp), z = max(0, mean d)"
    )

    _baseline: float
    """z of the mini-batch, which `select` measures."""

    def __init__(
        self,
        beta: PositiveFloat = 0.1,
        *,
        threshold: FiniteFloat = 0.0,
        desirable_weight: NonNegativeFloat = 1.0,
        undesirable_weight: NonNegativeFloat = 1.0,
    ) -> None:
        self.beta = beta
        self.threshold = threshold
        self.desirable_weight = desirable_weight
        self.undesirable_weight = undesirable_weight

    def select(self, logps: Tensor, batch: TrainBatch) -> Tensor:
        """Measure the baseline of the mini-batch; no token is treated apart."""
        distance, rows = self._distance(logps, batch).double(), batch.mask.any(-1)
        total, count = self.reduce(torch.stack((masked_sum(distance, rows), rows.sum().double()))).tolist()
        self._baseline = max(total / max(count, 1), 0.0)
        return torch.zeros_like(batch.mask)

    def per_sequence(self, out: PolicyOutput, batch: TrainBatch) -> SequenceOutput:
        desirable = batch.rewards > self.threshold
        margin = self.beta * (self._distance(out.logps, batch) - self._baseline)
        margin = torch.where(desirable, margin, -margin)
        weight = torch.where(desirable, self.desirable_weight, self.undesirable_weight)
        loss = weight * (1 - margin.sigmoid())
        margin = margin.detach()
        metrics = {
            "margin": margin.mean(),
            "preference_accuracy": (margin > 0).float().mean(),
            "baseline": margin.new_tensor(self._baseline),
        }
        return SequenceOutput(loss, metrics)

    def _distance(self, logps: Tensor, batch: TrainBatch) -> Tensor:
        """Return the log-ratio [B] to the reference."""
        return masked_sum(logps - batch.required("ref_logps"), batch.mask, -1)

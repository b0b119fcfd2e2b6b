"""Geometric-mean policy optimization's loss."""

from __future__ import annotations

from typing import ClassVar

import torch

from rlkit.base.ranges import NonNegativeFloat, Share
from rlkit.interfaces.loss import AdvantageLoss, Inputs
from rlkit.ops.aggregate import Aggregation
from rlkit.ops.masked import masked_mean, masked_sum
from rlkit.types import LossOutput, PolicyOutput, TrainBatch


class GMPO(AdvantageLoss):
    """-A r with r the geometric mean of the sequence's clipped ratios, A the mean of its advantages.

    Source: Zhao et al. 2025 (arXiv:2507.20673). Each token carries its sequence's loss, so that the mean over
    sequences of token means is the published one. Correction weights are averaged geometrically.

    Args:
        clip_low: Lower bound of a token's log-ratio, as a distance from 0.
        clip_high: Upper bound of a token's log-ratio, as a distance from 0.
    """

    aggregation: ClassVar[Aggregation] = "seq_mean_token_mean"
    inputs: ClassVar[Inputs] = AdvantageLoss.inputs | Inputs.CORRECTION
    formula: ClassVar[str] = "-A exp(mean_t clip(logp - old_logp, -{clip_low}, {clip_high})), clipped only against A"

    def __init__(self, clip_low: Share = 0.4, clip_high: NonNegativeFloat = 0.4) -> None:
        self.clip_low = clip_low
        self.clip_high = clip_high

    def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
        mask, count = batch.mask, batch.mask.sum(-1).clamp(min=1)
        log_ratio = out.logps - batch.old_logps
        clipped = log_ratio.clamp(-self.clip_low, self.clip_high)
        sign = batch.advantages.sign()
        bounded = sign * torch.minimum(sign * log_ratio, sign * clipped)
        ratio = (masked_sum(bounded, mask, -1) / count).exp()
        advantage = masked_sum(batch.advantages, mask, -1) / count
        loss = -advantage * ratio
        if batch.correction_weights is not None:
            loss = loss * (masked_sum((batch.correction_weights + 1e-10).log(), mask, -1) / count).exp()
        metrics = {
            "clip_fraction": masked_mean(bounded != log_ratio, mask),
            "kl_old": masked_mean(-log_ratio.detach(), mask),
        }
        return LossOutput(loss[:, None] * mask, metrics)

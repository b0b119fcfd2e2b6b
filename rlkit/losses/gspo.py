"""Group sequence policy optimization's loss."""

from __future__ import annotations

from typing import ClassVar

import torch

from rlkit.base.ranges import NonNegativeFloat, Share
from rlkit.interfaces.loss import AdvantageLoss
from rlkit.ops.aggregate import Aggregation
from rlkit.ops.masked import masked_mean, masked_sum
from rlkit.types import LossOutput, PolicyOutput, TrainBatch


class GSPO(AdvantageLoss):
    """The clipped loss with one ratio a sequence: s = exp(mean of the log-ratios), its gradient shared by the tokens.

    Source: Zheng et al. 2025 (arXiv:2507.18071), GSPO-token. Published with the mean over sequences of token means.

    Args:
        clip_low: Lower bound of the ratio, as a distance from 1.
        clip_high: Upper bound of the ratio, as a distance from 1.
    """

    aggregation: ClassVar[Aggregation] = "seq_mean_token_mean"
    formula: ClassVar[str] = "max(-A s, -A clip(s, 1 - {clip_low}, 1 + {clip_high})), s = exp(mean_t(logp - old_logp))"

    def __init__(self, clip_low: Share = 3e-4, clip_high: NonNegativeFloat = 4e-4) -> None:
        self.clip_low = clip_low
        self.clip_high = clip_high

    def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
        mask, advantages = batch.mask, batch.advantages
        log_ratio = out.logps - batch.old_logps
        mean = masked_sum(log_ratio, mask, -1) / mask.sum(-1).clamp(min=1)
        token = out.logps - out.logps.detach() + mean.detach()[:, None]
        ratio = token.clamp(max=10).exp()
        plain = -advantages * ratio
        clipped = -advantages * ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        metrics = {
            "clip_fraction": masked_mean(clipped > plain, mask),
            "kl_old": masked_mean(-log_ratio.detach(), mask),
        }
        return LossOutput(torch.maximum(plain, clipped), metrics)

"""Clipped importance sampling policy optimization's loss."""

from __future__ import annotations

from typing import ClassVar

from rlkit.base.ranges import NonNegativeFloat, Share
from rlkit.interfaces.loss import AdvantageLoss
from rlkit.ops.masked import masked_mean
from rlkit.types import LossOutput, PolicyOutput, TrainBatch


class CISPO(AdvantageLoss):
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logps: the weight is clipped, and every token keeps its gradient.

    Source: MiniMax 2025 (arXiv:2506.13585). The log-ratio is clamped to +-20.

    Args:
        clip_low: Lower bound of the weight, as a distance from 1; 1 is no bound.
        clip_high: Upper bound of the weight, as a distance from 1.
    """

    formula: ClassVar[str] = "-sg(clip(r, 1 - {clip_low}, 1 + {clip_high})) A logp, r = exp(logp - old_logp)"

    def __init__(self, clip_low: Share = 1.0, clip_high: NonNegativeFloat = 4.0) -> None:
        self.clip_low = clip_low
        self.clip_high = clip_high

    def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
        log_ratio = (out.logps.detach() - batch.old_logps).clamp(-20, 20)
        ratio = log_ratio.exp()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        metrics = {
            "clip_fraction": masked_mean(weight != ratio, batch.mask),
            "kl_old": masked_mean(-log_ratio, batch.mask),
        }
        return LossOutput(-weight * batch.advantages * out.logps, metrics)

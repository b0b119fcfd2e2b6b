"""The clipped surrogate loss of PPO."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Gt, Le

from rlkit.base.ranges import LARGEST_FLOAT, NUMBER, NonNegativeFloat, Share
from rlkit.interfaces.loss import AdvantageLoss
from rlkit.ops.masked import masked_mean, masked_means
from rlkit.types import LossOutput, PolicyOutput, TrainBatch


class ClipLoss(AdvantageLoss):
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(logps - old_logps), token by token.

    Source: Schulman et al. 2017 (arXiv:1707.06347), equation 7; unequal bounds from DAPO (arXiv:2503.14476,
    section 3.1); the dual clip, which bounds the loss at -A clip_dual where A < 0, from Ye et al. 2020
    (arXiv:1912.09729, equation 5). The log-ratio is clamped to +-20.

    Args:
        clip_low: Lower bound of the ratio, as a distance from 1.
        clip_high: Upper bound of the ratio, as a distance from 1.
        clip_dual: Upper bound of the ratio where the advantage is negative, more than 1; None is no bound.
    """

    def __init__(
        self,
        clip_low: Share = 0.2,
        clip_high: NonNegativeFloat = 0.2,
        clip_dual: Annotated[float, Gt(1), Le(LARGEST_FLOAT), NUMBER] | None = None,
    ) -> None:
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.clip_dual = clip_dual

    def explain(self) -> str:
        dual = "" if self.clip_dual is None else f", at most -{self.clip_dual} A where A < 0"
        return f"max(-A r, -A clip(r, 1 - {self.clip_low}, 1 + {self.clip_high})), r = exp(logp - old_logp){dual}"

    def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
        mask, advantages = batch.mask, batch.advantages
        log_ratio = (out.logps - batch.old_logps).clamp(-20, 20)
        ratio = log_ratio.exp()
        plain = -advantages * ratio
        clipped = -advantages * ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = torch.maximum(plain, clipped)
        clip_fraction, kl_old = masked_means((clipped > plain, -log_ratio.detach()), mask)
        metrics = {"clip_fraction": clip_fraction, "kl_old": kl_old}
        if self.clip_dual is not None:
            bound = -advantages * self.clip_dual
            metrics["clip_dual_fraction"] = masked_mean((loss.detach() > bound) & (advantages < 0), mask)
            loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
        return LossOutput(loss, metrics)

"""Second-moment trust policy optimization's loss."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rlkit.base.ranges import NonNegativeFloat
from rlkit.interfaces.loss import AdvantageLoss
from rlkit.ops.masked import masked_mean
from rlkit.types import LossOutput, PolicyOutput, TrainBatch


class M2PO(AdvantageLoss):
    """-A r, and 0 for the tokens furthest from the policy that sampled, so that a second moment stays within a bound.

    Of the tokens that a clip would bound, those with d > 0 where A > 0 or d < 0 where A < 0, d = logps - rollout_logps,
    the largest d^2 are left out until the mean of those that remain is at most `m2_threshold`; equal ones go together.

    Source: Zheng et al. 2025 (arXiv:2510.01161), in the reading of the authors' code, where the moment is that of the
    tokens that a clip would bound, and of the paper, where a token is left out and not clipped. They are selected over
    the global mini-batch. r compares with the old policy as in other losses: with the one that sampled, as published,
    where `train.old_logps` is rollout. The log-ratio is clamped to +-20.

    Args:
        m2_threshold: The largest second moment.
    """

    formula: ClassVar[str] = (
        "-A r, r = exp(logp - old_logp), 0 for the largest d^2 where A d > 0, until the rest has a mean d^2 of at most "
        "{m2_threshold}, d = logp - engine_logp"
    )

    def __init__(self, m2_threshold: NonNegativeFloat = 0.04) -> None:
        self.m2_threshold = m2_threshold

    def select(self, logps: Tensor, batch: TrainBatch) -> Tensor:
        distance = logps - batch.rollout_logps
        bounded = batch.accepted & (batch.advantages.sign() * distance > 0)
        squares = distance.float().square()
        smallest_first = self.gather(squares[bounded]).sort().values
        counts = torch.arange(1, len(smallest_first) + 1, device=squares.device)
        within = int((smallest_first.double().cumsum(0) / counts <= self.m2_threshold).sum())
        if within == len(smallest_first):
            return torch.zeros_like(bounded)
        return bounded & (squares >= smallest_first[within])

    def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
        log_ratio = (out.logps - batch.old_logps).clamp(-20, 20)
        metrics = {
            "clip_fraction": masked_mean(batch.selected, batch.mask),
            "kl_old": masked_mean(-log_ratio.detach(), batch.mask),
        }
        return LossOutput((-batch.advantages * log_ratio.exp()).masked_fill(batch.selected, 0.0), metrics)

"""Soft adaptive policy optimization's loss."""

from __future__ import annotations

from typing import ClassVar

import torch

from rlkit.base.ranges import PositiveFloat
from rlkit.interfaces.loss import AdvantageLoss
from rlkit.ops.aggregate import Aggregation
from rlkit.ops.masked import masked_mean
from rlkit.types import LossOutput, PolicyOutput, TrainBatch


class SAPO(AdvantageLoss):
    """-A sigmoid(tau (r - 1)) 4 / tau, with tau_pos where A > 0 and tau_neg elsewhere: a soft gate for the clip.

    Source: Gao et al. 2025 (arXiv:2511.20347). The log-ratio is clamped to +-20. Published with the mean over
    sequences of token means.

    Args:
        tau_pos: The gate's steepness where the advantage is positive.
        tau_neg: The gate's steepness elsewhere.
    """

    aggregation: ClassVar[Aggregation] = "seq_mean_token_mean"
    formula: ClassVar[str] = "-A sigmoid(tau (r - 1)) 4 / tau, tau = {tau_pos} if A > 0 else {tau_neg}"

    def __init__(self, tau_pos: PositiveFloat = 1.0, tau_neg: PositiveFloat = 1.05) -> None:
        self.tau_pos = tau_pos
        self.tau_neg = tau_neg

    def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
        log_ratio = (out.logps - batch.old_logps).clamp(-20, 20)
        tau = torch.where(batch.advantages > 0, self.tau_pos, self.tau_neg)
        gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau
        return LossOutput(-batch.advantages * gate, {"kl_old": masked_mean(-log_ratio.detach(), batch.mask)})

"""Policy optimization in a trust region of divergence."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from rlkit.base.ranges import LARGEST_FLOAT, NUMBER, NonNegativeFloat
from rlkit.interfaces.loss import AdvantageLoss
from rlkit.ops.masked import masked_mean
from rlkit.types import LossOutput, PolicyOutput, TrainBatch


class DPPO(AdvantageLoss):
    """-A sg(min(r, cap)) logps, where the token's divergence from the old policy is within bounds, else 0.

    The divergence is of the distribution {this token, all others}: total variation (the difference of probabilities)
    or Kullback-Leibler. Only updates that increase it are bounded.

    Source: Qi et al. 2026 (arXiv:2602.04879).

    Args:
        kind: `tv` or `kl`.
        clip_low: The bound where the advantage is not positive.
        clip_high: The bound where it is positive.
        cap: The largest ratio.
    """

    formula: ClassVar[str] = "-A sg(min(r, {cap})) logp if divergence_{kind} <= ({clip_high} if A > 0 else {clip_low})"

    def __init__(
        self,
        kind: Literal["tv", "kl"] = "tv",
        clip_low: NonNegativeFloat = 0.2,
        clip_high: NonNegativeFloat = 0.2,
        cap: Annotated[float, Ge(1), Le(LARGEST_FLOAT), NUMBER] = 20.0,
    ) -> None:
        self.kind = kind
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.cap = cap

    def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
        logps, old = out.logps.detach(), batch.old_logps
        within = self._within(logps, old, batch.advantages > 0)
        ratio = (logps - old).clamp(-20, 20).exp().clamp(max=self.cap)
        metrics = {
            "clip_fraction": masked_mean(~within, batch.mask),
            "kl_old": masked_mean(old - logps, batch.mask),
        }
        return LossOutput(-batch.advantages * ratio * out.logps * within, metrics)

    def _within(self, logps: Tensor, old: Tensor, positive: Tensor) -> Tensor:
        p, q = logps.exp(), old.exp()
        if self.kind == "tv":
            return torch.where(positive, p - q <= self.clip_high, p - q >= -self.clip_low)
        divergence = q * (old - logps) + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
        up = (divergence <= self.clip_high) | (p <= q)
        down = (divergence <= self.clip_low) | (p >= q)
        return torch.where(positive, up, down)

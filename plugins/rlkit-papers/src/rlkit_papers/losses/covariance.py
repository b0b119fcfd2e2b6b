"""Losses for the tokens whose log-probs and advantages covary most, which reduce entropy most."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rlkit.base.errors import RecipeError
from rlkit.base.ranges import NonNegativeFloat, PositiveFloat, PositiveShare, Share
from rlkit.interfaces.loss import TokenLoss
from rlkit.ops.masked import masked_mean, masked_sum
from rlkit.ops.random import uniform
from rlkit.types import LossOutput, PolicyOutput, TrainBatch


class _Covariance(TokenLoss):
    """Selects tokens over the whole mini-batch: all ranks, all micro-batches."""

    def _covariance(self, logps: Tensor, batch: TrainBatch) -> tuple[Tensor, float]:
        """Return (A - mean A)(logp - mean logp) at each token [B,T], and the number of tokens."""
        sums = [masked_sum(x.double(), batch.mask) for x in (batch.advantages, logps)]
        advantages, log_probs, tokens = self.reduce(torch.stack((*sums, batch.mask.sum().double())))
        count = tokens.clamp(min=1)
        return (batch.advantages - (advantages / count).float()) * (logps - (log_probs / count).float()), float(tokens)

    def _largest(self, x: Tensor, eligible: Tensor, count: int) -> Tensor:
        """Return a mask [B,T] of the `count` (at least one) largest x among the eligible tokens of all ranks."""
        values = self.gather(x[eligible])
        if len(values) == 0:
            return torch.zeros_like(eligible)
        threshold = values.topk(min(max(count, 1), len(values))).values[-1]
        return x >= threshold


class ClipCov(_Covariance):
    """The clipped loss, with 0 for a random few of the tokens whose covariance lies between two bounds.

    Source: Cui et al. 2025 (arXiv:2505.22617). The tokens are selected over the global mini-batch, invariant
    to its split; clipped ones are excluded.

    Args:
        clip_low: Lower bound of the ratio, as a distance from 1.
        clip_high: Upper bound of the ratio, as a distance from 1.
        fraction: Share of all tokens that is selected.
        cov_low: The smallest covariance of an eligible token.
        cov_high: The largest.
    """

    formula: ClassVar[str] = (
        "max(-A r, -A clip(r, 1 - {clip_low}, 1 + {clip_high})), 0 for {fraction} of all tokens, "
        "among those with {cov_low} < cov < {cov_high}"
    )

    def __init__(
        self,
        clip_low: Share = 0.2,
        clip_high: NonNegativeFloat = 0.2,
        *,
        fraction: PositiveShare = 2e-4,
        cov_low: NonNegativeFloat = 1.0,
        cov_high: PositiveFloat = 5.0,
    ) -> None:
        if cov_low >= cov_high:
            raise RecipeError(f"ClipCov has cov_low={cov_low} and cov_high={cov_high}, expected cov_low < cov_high")
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.fraction = fraction
        self.cov_low = cov_low
        self.cov_high = cov_high

    def select(self, logps: Tensor, batch: TrainBatch) -> Tensor:
        covariance, tokens = self._covariance(logps, batch)
        plain, clipped = self._plain_and_clipped(logps, batch)
        eligible = batch.mask & (clipped <= plain) & (covariance > self.cov_low) & (covariance < self.cov_high)
        # a pseudo-random number per token, from what was sampled there and not from the row's position
        bits = batch.rollout_logps.contiguous().view(torch.int32).long()
        priority = uniform(bits * 1_000_003 + batch.group[:, None], batch.tokens)
        return eligible & self._largest(priority, eligible, int(self.fraction * tokens))

    def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
        plain, clipped = self._plain_and_clipped(out.logps, batch)
        metrics = {
            "clip_fraction": masked_mean(clipped > plain, batch.mask),
            "cov_fraction": masked_mean(batch.selected, batch.mask),
            "kl_old": masked_mean(batch.old_logps - out.logps.detach(), batch.mask),
        }
        return LossOutput(torch.maximum(plain, clipped) * ~batch.selected, metrics)

    def _plain_and_clipped(self, logps: Tensor, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        ratio = (logps - batch.old_logps).exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return -batch.advantages * ratio, -batch.advantages * clipped


class KLCov(_Covariance):
    """-A r, with coef |log r| added for the few tokens of the largest covariance.

    Source: Cui et al. 2025 (arXiv:2505.22617). The tokens are selected over the global mini-batch; only positive
    covariances count, so none is selected where all advantages are equal.

    Args:
        fraction: Share of all tokens that is selected.
        coef: The weight of the penalty.
    """

    formula: ClassVar[str] = "-A r + {coef} |logp - old_logp| for the {fraction} of all tokens with the largest cov"

    def __init__(self, fraction: PositiveShare = 2e-4, coef: NonNegativeFloat = 1.0) -> None:
        self.fraction = fraction
        self.coef = coef

    def select(self, logps: Tensor, batch: TrainBatch) -> Tensor:
        covariance, tokens = self._covariance(logps, batch)
        eligible = batch.mask & (covariance > 0)
        return eligible & self._largest(covariance, eligible, int(self.fraction * tokens))

    def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
        log_ratio = out.logps - batch.old_logps
        loss = -batch.advantages * log_ratio.exp() + self.coef * log_ratio.abs() * batch.selected
        metrics = {
            "cov_fraction": masked_mean(batch.selected, batch.mask),
            "kl_old": masked_mean(-log_ratio.detach(), batch.mask),
        }
        return LossOutput(loss, metrics)

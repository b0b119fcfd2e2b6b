"""Policy gradients weighted by a function of the ratio of the complete sequence: VESPO and TOPR."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from rlkit.base.ranges import NonNegativeFloat, PositiveFloat
from rlkit.interfaces.loss import AdvantageLoss
from rlkit.ops.aggregate import Aggregation
from rlkit.ops.masked import masked_mean, masked_sum
from rlkit.types import LossOutput, PolicyOutput, TrainBatch

LOG_RATIO_RANGE = (math.log(1e-8), 20.0)
"""Bounds of a sequence's log-ratio, as in VESPO's published code."""


class WeightedSequences(AdvantageLoss):
    """-sg(weight) A logp, with one weight for the tokens of a sequence. Override `weights`.

    w is the ratio of the sequence, exp of the sum of logps - old_logps. `train.old_logps: rollout` compares with the
    policy that sampled, as both publications do.
    """

    @abstractmethod
    def weights(self, log_w: Tensor, positive: Tensor) -> Tensor:
        """Return the weight of each token [B,T] from log w [B,1] and from where its advantage is not negative [B,T]."""

    def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
        log_ratio = out.logps.detach() - batch.old_logps
        log_w = masked_sum(log_ratio.clamp(-20, 20), batch.mask, -1).clamp(*LOG_RATIO_RANGE)[:, None]
        weight = self.weights(log_w, batch.advantages >= 0)
        metrics = {
            "sequence_weight": masked_mean(weight, batch.mask),
            "kl_old": masked_mean(-log_ratio, batch.mask),
        }
        return LossOutput(-weight * batch.advantages * out.logps, metrics)


class VESPO(WeightedSequences):
    """-sg(w^k exp(decay (1 - w))) A logp, w the ratio of the sequence: full weight at w = 1, none far from it.

    Source: Shen et al. 2026 (arXiv:2602.10693): the closed form of a variational problem, which replaces clips and the
    normalisation by length. log w is clamped to [log 1e-8, 20], and the log-ratio of a token to +-20.

    Args:
        k_pos: Exponent of w where the advantage is not negative.
        decay_pos: Rate at which the weight decays with w there.
        k_neg: Exponent of w where the advantage is negative.
        decay_neg: Rate at which the weight decays with w there.
    """

    formula: ClassVar[str] = (
        "-sg(w^k exp(decay (1 - w))) A logp, w = exp(sum_t(logp - old_logp)), "
        "k, decay = {k_pos}, {decay_pos} if A >= 0 else {k_neg}, {decay_neg}"
    )

    def __init__(
        self,
        k_pos: NonNegativeFloat = 2.0,
        decay_pos: PositiveFloat = 3.0,
        k_neg: NonNegativeFloat = 3.0,
        decay_neg: PositiveFloat = 2.0,
    ) -> None:
        self.k_pos = k_pos
        self.decay_pos = decay_pos
        self.k_neg = k_neg
        self.decay_neg = decay_neg

    def weights(self, log_w: Tensor, positive: Tensor) -> Tensor:
        k = torch.where(positive, self.k_pos, self.k_neg)
        decay = torch.where(positive, self.decay_pos, self.decay_neg)
        return (k * log_w + decay * (1 - log_w.exp())).exp()


class TOPR(WeightedSequences):
    """-A logp where A >= 0, else -sg(min(w, 1)) A logp, w the ratio of the sequence.

    Samples of older policies then reinforce as in supervised training, while a bad completion stops counting once the
    policy no longer samples it. Source: Le Roux et al. 2025 (arXiv:2503.14286), published with sums over tokens.
    """

    aggregation: ClassVar[Aggregation] = "seq_mean_token_sum"
    formula: ClassVar[str] = "-A logp if A >= 0 else -sg(min(w, 1)) A logp, w = exp(sum_t(logp - old_logp))"

    def weights(self, log_w: Tensor, positive: Tensor) -> Tensor:
        return torch.where(positive, 1.0, log_w.clamp(max=0).exp())

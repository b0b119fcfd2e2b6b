"""Direct reward optimization's loss."""

from __future__ import annotations

from typing import ClassVar

from rlkit.base.ranges import PositiveFloat
from rlkit.interfaces.loss import TokenLoss
from rlkit.ops.masked import masked_mean
from rlkit.types import LossOutput, PolicyOutput, TrainBatch


class DRO(TokenLoss):
    """-A logp + beta / 2 (logp - old_logp)^2, token by token: a quadratic penalty instead of a clip.

    Source: Richemond et al. 2024 (arXiv:2405.19107), applied to tokens, with the advantage in place of the
    reward less a value. `train.old_logps: rollout` compares with the policy that sampled. The log-ratio is clamped to
    +-20.

    Args:
        beta: Strength of the penalty.
    """

    formula: ClassVar[str] = "-A logp + {beta} / 2 (logp - old_logp)^2"

    def __init__(self, beta: PositiveFloat = 0.1) -> None:
        self.beta = beta

    def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
        log_ratio = (out.logps - batch.old_logps).clamp(-20, 20)
        penalty = 0.5 * self.beta * log_ratio.square()
        metrics = {"kl_old": masked_mean(-log_ratio.detach(), batch.mask)}
        return LossOutput(-batch.advantages * out.logps + penalty, metrics)

"""Corrections for the mismatch between the policy that samples (engine) and the one that is trained (trainer)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rlkit.ops.masked import Reducer, masked_means, masked_sum

WeightLevel = Literal["token", "sequence"]
Statistic = Literal["k1", "k2", "k3", "binary_kl"]
RejectLevel = Literal["token", "seq_sum", "seq_mean", "seq_max"]


def importance_weights(
    old_logps: Tensor,
    rollout_logps: Tensor,
    mask: Tensor,
    level: WeightLevel = "token",
    *,
    low: float | None = None,
    high: float = 2.0,
) -> Tensor:
    """Return detached weights pi_trainer / pi_engine [B,T] f32, 0 outside the mask.

    Without `low` they are capped at `high` (truncated importance sampling, Yao et al. 2025); with it, those outside
    [low, high] are 0 (IcePop). Log-ratios, of a token or summed over a sequence, are clamped to +-20.
    """
    log_ratio = (old_logps - rollout_logps).detach().float()
    if level == "sequence":
        log_ratio = masked_sum(log_ratio, mask, -1)[:, None]
    weight = log_ratio.clamp(-20, 20).exp()
    if low is None:
        return weight.clamp(max=high) * mask
    return weight.masked_fill((weight < low) | (weight > high), 0.0) * mask


def loglinear_logps(logps: Tensor, rollout_logps: Tensor, versions: Tensor, version: int) -> Tensor:
    """Return approximate log-probs [B,T] of the weights before the update, without a forward pass.

    They are alpha log pi_engine + (1 - alpha) log pi, detached, with alpha = 1 / d for a token's staleness d. The
    trained policy pi is one version ahead of the weights before the update, so d is 1 for a token that those weights
    sampled, and the result is the engine's log-prob.

    Source: A-3PO (Li et al. 2025, arXiv:2512.06547), read such that staleness is counted from the trained policy; the
    paper's alpha = 0 for d = 0 does not occur.

    Args:
        logps: [B,T], of the trained policy.
        rollout_logps: [B,T], of the engine.
        versions: [B,T] i64, versions of the weights that sampled each token.
        version: Version of the weights before the update.
    """
    staleness = (version + 1 - versions).clamp(min=1)
    return rollout_logps + (1 - 1 / staleness) * (logps.detach() - rollout_logps)


class AcceptanceRule(NamedTuple):
    """How close to the trainer's policy a token or a sequence must be.

    k1 accepts ratios pi_trainer / pi_engine, at `level`, in [low, high]. k2 = (log ratio)^2 / 2, k3 = ratio - 1 -
    log ratio and `binary_kl` accept values up to `high`.

    Args:
        statistic: What is compared with the bounds.
        level: Whether the statistic is of a token, or of a sequence, which is accepted or rejected as a whole.
        low: Lower bound of k1; 1 / high if None.
        high: Upper bound.
    """

    statistic: Statistic = "k1"
    level: RejectLevel = "token"
    low: float | None = None
    high: float = 2.0


def accepted(old_logps: Tensor, rollout_logps: Tensor, mask: Tensor, rule: AcceptanceRule) -> Tensor:
    """Return the tokens [B,T] bool under the mask that are close enough to the trainer's policy to train on."""
    statistic, level, low, high = rule
    if mask.numel() == 0:
        return mask
    value = _divergence(old_logps.detach().float(), rollout_logps.float(), statistic)
    if level != "token":
        total = masked_sum(value, mask, -1)
        if level == "seq_mean":
            total = total / mask.sum(-1).clamp(min=1)
        elif level == "seq_max":
            outside = torch.full_like(value, -torch.inf)
            total = torch.where(mask, value, outside).amax(-1)
        value = total[:, None]
    if statistic != "k1":
        return mask & (value <= high)
    lowest = 1 / high if low is None else low
    return mask & (value >= torch.tensor(lowest).log()) & (value <= torch.tensor(high).log())


def _divergence(logps: Tensor, rollout_logps: Tensor, statistic: Statistic) -> Tensor:
    if statistic == "binary_kl":
        return binary_kl(logps, rollout_logps)
    log_ratio = (logps - rollout_logps).clamp(-20, 20)
    if statistic == "k1":
        return log_ratio
    return log_ratio**2 / 2 if statistic == "k2" else log_ratio.exp() - 1 - log_ratio


def binary_kl(logps: Tensor, rollout_logps: Tensor) -> Tensor:
    """Return max(KL(p || q), KL(q || p)) [B,T] of the distributions {sampled token, any other token}, at each token.

    With probabilities x and y of the token, KL(p || q) = x log(x / y) + (1 - x) log((1 - x) / (1 - y)); x and y are
    clamped to [1e-6, 1 - 1e-6].

    Source: KPop (Guo et al. 2026, ringtech.notion.site/kpop), which accepts tokens up to 0.1.
    """
    x = logps.double().exp().clamp(1e-6, 1 - 1e-6)
    y = rollout_logps.double().exp().clamp(1e-6, 1 - 1e-6)
    log_ratio = (x / y).log()
    complement_log_ratio = ((1 - x) / (1 - y)).log()
    kl_pq = x * log_ratio + (1 - x) * complement_log_ratio
    kl_qp = -(y * log_ratio + (1 - y) * complement_log_ratio)
    return torch.maximum(kl_pq, kl_qp).float()


def off_policy_tokens(
    logps: Tensor, rollout_logps: Tensor, advantages: Tensor, mask: Tensor, threshold: float
) -> Tensor:
    """Return the tokens [B,T] bool with A < 0 in sequences whose mean of log pi_engine - log pi exceeds the threshold.

    pi is the trained policy, and the mean is over the policy's own tokens.

    Source: DeepSeek-V3.2 (arXiv:2512.02556, off-policy sequence masking).
    """
    drift = masked_sum((rollout_logps - logps).detach(), mask, -1) / mask.sum(-1).clamp(min=1)
    return mask & (advantages < 0) & (drift > threshold)[:, None]


class LogpMismatch(NamedTuple):
    """The mismatch between the trainer's and the engine's log-probs over all ranks; scalars."""

    kl: Tensor  # mean of log pi_engine - log pi_trainer: the k1 estimate of KL(engine || trainer)
    k3: Tensor  # low-variance estimate of the same
    ppl_engine: Tensor
    ppl_trainer: Tensor
    chi2_token: Tensor
    chi2_sequence: Tensor
    ess: Tensor  # effective sample size of token weights, as a share
    probs_diff_mean: Tensor
    probs_correlation: Tensor


def logp_mismatch(
    old_logps: Tensor, rollout_logps: Tensor, mask: Tensor, reduce: Reducer = lambda x: x
) -> LogpMismatch:
    """Return the mismatch under the mask [B,T]; sequence metrics are means over the rows with tokens."""
    rows = mask.any(-1)
    log_ratio = (old_logps - rollout_logps).clamp(-20, 20)
    ratio = log_ratio.exp()
    per_row = mask.sum(-1).clamp(min=1)

    def perplexity(logps: Tensor) -> Tensor:
        return (-masked_sum(logps, mask, -1) / per_row).exp()

    p, q = old_logps.exp(), rollout_logps.exp()
    kl, k3, weight, squared_weight, difference, mean_p, mean_q = masked_means(
        (-log_ratio, ratio - 1 - log_ratio, ratio, ratio**2, (p - q).abs(), p, q), mask, reduce
    )
    dp, dq = p - mean_p, q - mean_q
    covariance, *variances = masked_means((dp * dq, dp**2, dq**2), mask, reduce)
    ratio_of_row = (2 * masked_sum(log_ratio, mask, -1).clamp(-20, 20)).exp()
    ppl_engine, ppl_trainer, squared_weight_of_row = masked_means(
        (perplexity(rollout_logps), perplexity(old_logps), ratio_of_row), rows, reduce
    )
    return LogpMismatch(
        kl=kl,
        k3=k3,
        ppl_engine=ppl_engine,
        ppl_trainer=ppl_trainer,
        chi2_token=squared_weight - 1,
        chi2_sequence=squared_weight_of_row - 1,
        ess=weight**2 / squared_weight.clamp(min=1e-12),
        probs_diff_mean=difference,
        probs_correlation=covariance / (variances[0] * variances[1]).sqrt().clamp(min=1e-12),
    )

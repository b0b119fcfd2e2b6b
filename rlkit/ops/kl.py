"""Estimates of the Kullback-Leibler divergence from sampled tokens (Schulman 2020, joschu.net/blog/kl-approx)."""

from __future__ import annotations

from math import log
from typing import Literal, cast

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"]
"""The estimator; a `+` keeps its value but takes the gradient of k2 (straight-through)."""


def estimate(logps: Tensor, ref_logps: Tensor, kind: KLEstimator = "k3") -> Tensor:
    """Estimate KL(policy || reference) token by token, in the shape of `logps`.

    With d = logps - ref_logps: k1 = d, k2 = d^2/2, k3 = exp(-d) + d - 1, abs = |d|. In k3, -d is clamped to +-20 and
    the value to +-10; clamped values have no gradient.
    """
    d = logps.float() - ref_logps.float()
    if kind.endswith("+"):
        value = estimate(logps, ref_logps, cast(KLEstimator, kind[:-1]))
        k2 = 0.5 * d**2
        return k2 - k2.detach() + value.detach()
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d**2
    if kind == "abs":
        return d.abs()
    x = (-d).clamp(-20, 20)
    return (x.exp() - x - 1).clamp(-10, 10)


def importance_weighted(divergence: Tensor, logps: Tensor, old_logps: Tensor) -> Tensor:
    """Return per-token KL estimates times pi / pi_old, in the shape of `logps`.

    pi is the trained policy, and the ratio has a gradient. Over tokens sampled by pi_old, the mean of k1 or k3 and its
    gradient then estimate those of KL(pi || reference) without bias. Log-ratios are clamped to +-20.

    Source: DeepSeek-V3.2 (arXiv:2512.02556, unbiased KL estimate), for k3.
    """
    return (logps - old_logps).clamp(-20, 20).exp() * divergence


def with_rest(logps: Tensor) -> Tensor:
    """Return log-probs [...,K] and that of all other outcomes together; [...,K+1]."""
    rest = -torch.expm1(logps.logsumexp(-1, keepdim=True))
    return torch.cat((logps, rest.clamp(min=torch.finfo(rest.dtype).tiny).log()), -1)


def sorted_distance(teacher: Tensor, policy: Tensor) -> Tensor:
    """Return the sum [...] of the differences of probabilities, of the same rank each; the shorter list ends in 0.

    It is the ULD loss of distributions over different vocabularies (Boizard et al. 2024, arXiv:2402.12030).

    Args:
        teacher: [...,K] the highest log-probs, in falling order.
        policy: [...,L] those of the other distribution.
    """
    size = max(teacher.shape[-1], policy.shape[-1])
    probs = [torch.nn.functional.pad(x.exp(), (0, size - x.shape[-1])) for x in (teacher, policy)]
    return (probs[0] - probs[1]).abs().sum(-1)


def jensen_shannon(teacher: Tensor, policy: Tensor, beta: float) -> Tensor:
    """Return the generalised Jensen-Shannon divergence [...] of two distributions [...,K], given their log-probs.

    It is beta KL(teacher || m) + (1 - beta) KL(policy || m) with m = beta teacher + (1 - beta) policy. At beta = 0 it
    is KL(teacher || policy), and at beta = 1 KL(policy || teacher): the limits of the divergence over beta and over
    1 - beta, since the divergence itself is 0 there. Source: Agarwal et al. 2024 (arXiv:2306.13649), equation 1.
    """
    if beta == 0:
        return (teacher.exp() * (teacher - policy)).sum(-1)
    if beta == 1:
        return (policy.exp() * (policy - teacher)).sum(-1)
    mixture = torch.logaddexp(teacher + log(beta), policy + log(1 - beta))
    parts = beta * teacher.exp() * (teacher - mixture) + (1 - beta) * policy.exp() * (policy - mixture)
    return parts.sum(-1)

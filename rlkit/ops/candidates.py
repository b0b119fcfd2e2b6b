"""Statistics of distributions that are restricted to some tokens of the vocabulary."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from rlkit.ops.logps import TokenStatistics
from rlkit.ops.sampling import Truncation, truncate
from rlkit.types import Reads, Sampling

ROUNDING = 1e-3
"""The largest probability mass by which a server's sum up to a token may differ from ours."""


def over_candidates(statistics: TokenStatistics, candidates: Tensor, reads: Reads) -> TokenStatistics:
    """Return the statistics of distributions that are renormalised over their candidates, with their gradients.

    With S the candidates: log p_S(t) = log p(t) - log sum_{j in S} p(j). A token without candidates keeps its log-prob,
    and has an entropy of 0. Source: sampling replay, as prime-rl ("kept tokens") and TRL 1.17 do it.

    Args:
        statistics: Of the full distributions of N tokens; `top` has the log-probs of the candidates.
        candidates: [N,K] ids, then -1.
        reads: Which statistics to return: entropy and squares.
    """
    assert statistics.top is not None
    present = candidates >= 0
    restricted = present.any(-1)
    logps = statistics.top[:, :-1].masked_fill(~present, -torch.inf)
    logps = logps.where(restricted[:, None], 0.0)  # a row of minus infinity would have a gradient of NaN
    mass = logps.logsumexp(-1)
    probs = (logps - mass[:, None]).exp()
    surprise = (mass[:, None] - logps).masked_fill(~present, 0.0)
    return TokenStatistics(
        statistics.logps - mass.where(restricted, 0.0),
        (probs * surprise).sum(-1) if reads.entropy else None,
        probs.detach().square().sum(-1) if reads.squares else None,
    )


def candidates_of(
    tokens: Sequence[int], ids: Sequence[Sequence[int]], logps: Sequence[Sequence[float]], sampling: Sampling
) -> tuple[list[Sequence[int]], list[float]]:
    """Return the candidates of n sampled tokens, and the log of their total probability, from the most likely tokens.

    Args:
        tokens: The n sampled tokens.
        ids: For each of them the `top_k` most likely tokens, the likeliest first.
        logps: Their log-probs in the full distribution.
        sampling: The limits; `top_p` is a mass of the full distribution.

    Raises:
        ValueError: A token is not among those that the limits leave.
    """
    probs = torch.tensor(logps, dtype=torch.float64).view(len(tokens), -1).exp()
    limits = Truncation(*(torch.tensor([limit]) for limit in (sampling.top_p, sampling.top_k, sampling.min_p)))
    is_token = torch.tensor(ids).view(probs.shape) == torch.tensor(tokens)[:, None]
    rounded = limits._replace(top_p=limits.top_p + ROUNDING * (limits.top_p < 1))
    if not ((truncate(probs, rounded) > 0) & is_token).any(-1).all():
        raise ValueError(
            f"a token is not among those that top_p={sampling.top_p}, top_k={sampling.top_k} and "
            f"min_p={sampling.min_p} leave"
        )
    present = (truncate(probs, limits) > 0) | is_token
    chosen = [
        array("i", [i for i, p in zip(row, keep, strict=True) if p])
        for row, keep in zip(ids, present.tolist(), strict=True)
    ]
    return list(chosen), (probs * present).sum(-1).log().tolist()

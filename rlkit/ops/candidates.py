"""Statistics of distributions that are restricted to some tokens of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkit.ops.logps import TokenStatistics
from rlkit.types import Reads


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

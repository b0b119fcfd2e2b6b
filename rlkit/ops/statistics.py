"""What metrics of validation are worth: intervals, chances among several samples, and whether two differ."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import comb, sqrt
from operator import add, mul
from statistics import NormalDist
from typing import NamedTuple

import torch

LEVEL = 0.95
"""The share of intervals that hold the true value."""

DRAWS = 4000
"""Samples that a bootstrap draws."""

ROUNDING = 1e-12
"""The share of a sum of squares up to which what is left about the mean is rounding."""


class Interval(NamedTuple):
    """The bounds of a metric."""

    low: float
    high: float


def wilson(right: int, count: int, level: float = LEVEL) -> Interval:
    """Return the interval of a share of `count` independent trials (Wilson 1927; never empty, never beyond 0 or 1)."""
    if count == 0:
        return Interval(0.0, 1.0)
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, spread = right / count, z * z / count
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * sqrt(share * (1 - share) / count + spread / count / 4)
    return Interval(middle - half if right else 0.0, middle + half if right < count else 1.0)


def bootstrap(values: Sequence[float], level: float = LEVEL, seed: int = 0) -> Interval:
    """Return the interval of a mean over prompts, each with one value, by draws with replacement (Efron 1979).

    Samples of one prompt are not independent: pass the mean of each prompt.
    """
    if not values:
        return Interval(float("nan"), float("nan"))
    bounds = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = _drawn_means(values, seed).quantile(bounds).tolist()
    return Interval(low, high)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the chance that at least one of `k` of the samples is right (Chen et al. 2021, eq. 1; unbiased).

    Raises:
        ValueError: There are fewer than `k` samples.
    """
    if k > samples:
        raise ValueError(f"pass@{k} of {samples} samples, expected at least {k}")
    return 1 - comb(samples - right, k) / comb(samples, k)


def majority(answers: Sequence[Hashable], right: Sequence[bool]) -> float:
    """Return the chance that the most frequent answer is right, equally frequent ones being equally likely.

    Args:
        answers: Of one prompt; None for a sample without an answer, which has no vote.
        right: Whether each is.
    """
    counts: dict[Hashable, int] = {}
    verdicts: dict[Hashable, bool] = {}
    for answer, verdict in zip(answers, right, strict=True):
        if answer is not None:
            counts[answer] = counts.get(answer, 0) + 1
            verdicts[answer] = verdicts.get(answer, False) or verdict
    most = max(counts.values(), default=0)
    first = [answer for answer, count in counts.items() if count == most]
    return sum(verdicts[answer] for answer in first) / len(first) if first else 0.0


def sign_test(better: int, worse: int) -> float:
    """Return the exact two-sided p-value of pairs that differ (McNemar 1947): as likely one way as the other."""
    count = better + worse
    tail = sum(comb(count, i) for i in range(min(better, worse) + 1))
    return min(1.0, float(2 * tail / 2**count))


def paired_p_value(differences: Sequence[float], seed: int = 0) -> float:
    """Return the two-sided p-value of a mean difference between pairs, by random changes of their signs (Fisher 1935).

    The observed signs count as one of the changes, so that it is never 0.
    """
    values = torch.tensor([x for x in differences if x], dtype=torch.float64)
    if not len(values):
        return 1.0
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, (DRAWS, len(values)), generator=generator, dtype=torch.float64) * 2 - 1
    extreme = int(((signs @ values).abs() >= values.sum().abs() - 1e-12).sum())
    return (1 + extreme) / (1 + DRAWS)


class Moments(NamedTuple):
    """Sums over pairs: their number, both sides, both squares and the product; those of several parts add up."""

    pairs: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    yy: float = 0.0
    xy: float = 0.0

    @classmethod
    def of(cls, x: Sequence[float], y: Sequence[float]) -> Moments:
        """Return the sums of pairs."""
        return cls(len(x), sum(x), sum(y), sum(a * a for a in x), sum(b * b for b in y), sum(map(mul, x, y)))

    def plus(self, other: Moments) -> Moments:
        """Return the sums over the pairs of both."""
        return Moments(*map(add, self, other))

    def centered(self) -> Moments:
        """Return the sums of the same pairs about their means; what is only rounding of a constant side is 0."""
        if not self.pairs:
            return self
        xx, yy = self.xx - self.x**2 / self.pairs, self.yy - self.y**2 / self.pairs
        xx, yy = xx * (xx > ROUNDING * self.xx), yy * (yy > ROUNDING * self.yy)
        return Moments(self.pairs, 0.0, 0.0, xx, yy, self.xy - self.x * self.y / self.pairs)

    @property
    def correlation(self) -> float:
        """Pearson's correlation, between -1 and 1; NaN where one side is constant."""
        about = self.centered()
        if not (about.xx > 0 and about.yy > 0):
            return float("nan")
        return max(-1.0, min(1.0, about.xy / sqrt(about.xx) / sqrt(about.yy)))


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Return Spearman's correlation of pairs (1904): of their ranks, equal values having the mean of theirs."""
    return Moments.of(_ranks(x), _ranks(y)).correlation


def repeated(tokens: Sequence[int]) -> tuple[int, int]:
    """Return how many of a text's runs of four tokens occurred in it before, and how many runs there are."""
    runs = max(0, len(tokens) - 3)
    return runs - len(set(zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False))), runs


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the ranks of values, about their mean."""
    known = torch.tensor(values, dtype=torch.float64)
    _, places, counts = torch.unique(known, return_inverse=True, return_counts=True)
    last = counts.cumsum(0)
    ranks: list[float] = ((2 * last - counts - len(known)).double()[places] / 2).tolist()
    return ranks


def _drawn_means(values: Sequence[float], seed: int) -> torch.Tensor:
    """Return the means [DRAWS] of as many values, drawn with replacement."""
    known = torch.tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    rows = max(1, 2**22 // len(known))
    parts = [
        known[torch.randint(len(known), (min(rows, DRAWS - start), len(known)), generator=generator)].mean(1)
        for start in range(0, DRAWS, rows)
    ]
    return torch.cat(parts)

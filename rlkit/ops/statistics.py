"""Statistics of validation metrics: confidence intervals, pass@k, majority votes, significance tests, correlations."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import comb, sqrt
from operator import add, mul
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # a report of a run in progress needs intervals, and no torch
    from torch import Tensor

LEVEL = 0.95
"""The confidence level of intervals."""

DRAWS = 4000
"""The number of resamples of a bootstrap or a permutation test."""

ROUNDING = 1e-12
"""The share of a sum of squares up to which the centered sum of squares counts as rounding error."""


class Interval(NamedTuple):
    """A confidence interval."""

    low: float
    high: float


def wilson(successes: int, count: int, level: float = LEVEL) -> Interval:
    """Return the interval of a proportion of `count` independent trials (Wilson 1927; never empty, within [0, 1])."""
    if count == 0:
        return Interval(0.0, 1.0)
    z = NormalDist().inv_cdf((1 + level) / 2)
    share = successes / count
    spread = z * z / count
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * sqrt(share * (1 - share) / count + spread / count / 4)
    return Interval(middle - half if successes else 0.0, middle + half if successes < count else 1.0)


def bootstrap(values: Sequence[float], level: float = LEVEL, seed: int = 0) -> Interval:
    """Return the interval of a mean over prompts with one value each, by resampling (Efron 1979).

    Samples of one prompt are not independent: pass the mean of each prompt.
    """
    if not values:
        return Interval(float("nan"), float("nan"))
    low, high = np.quantile(_resampled_means(values, seed), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the probability that at least one of `k` samples is right (Chen et al. 2021, eq. 1; unbiased).

    Raises:
        ValueError: There are fewer than `k` samples.
    """
    if k > samples:
        raise ValueError(f"pass@{k} of {samples} samples, expected at least {k}")
    return 1 - comb(samples - right, k) / comb(samples, k)


def majority(answers: Sequence[Hashable], right: Sequence[bool]) -> float:
    """Return the probability that the most frequent answer is right; ties are broken at random.

    Args:
        answers: The answers of one prompt's samples; None for a sample without an answer, which has no vote.
        right: Whether each answer is right.
    """
    counts: dict[Hashable, int] = {}
    verdicts: dict[Hashable, bool] = {}
    for answer, verdict in zip(answers, right, strict=True):
        if answer is not None:
            counts[answer] = counts.get(answer, 0) + 1
            verdicts[answer] = verdicts.get(answer, False) or verdict
    max_count = max(counts.values(), default=0)
    winners = [answer for answer, count in counts.items() if count == max_count]
    return sum(verdicts[answer] for answer in winners) / len(winners) if winners else 0.0


def sign_test(better: int, worse: int) -> float:
    """Return the exact two-sided p-value of equally likely differences in either direction (McNemar 1947)."""
    count = better + worse
    tail = sum(comb(count, i) for i in range(min(better, worse) + 1))
    return min(1.0, float(2 * tail / 2**count))


def paired_p_value(differences: Sequence[float], seed: int = 0) -> float:
    """Return the two-sided p-value of a mean paired difference by a sign-flip permutation test (Fisher 1935).

    The observed signs count as one permutation, so the p-value is never 0.
    """
    values = np.array([x for x in differences if x], dtype=np.float64)
    if not len(values):
        return 1.0
    signs = _draws(np.random.RandomState(seed), 2, DRAWS, len(values)) * 2.0 - 1
    extreme = int((np.abs(signs @ values) >= abs(values.sum()) - 1e-12).sum())
    return (1 + extreme) / (1 + DRAWS)


class Moments(NamedTuple):
    """Sums over pairs (x, y): their number, x, y, x^2, y^2 and x y; sums of several parts add up."""

    pairs: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    yy: float = 0.0
    xy: float = 0.0

    @classmethod
    def from_pairs(cls, x: Sequence[float], y: Sequence[float]) -> Moments:
        """Return the sums over pairs."""
        return cls(len(x), sum(x), sum(y), sum(a * a for a in x), sum(b * b for b in y), sum(map(mul, x, y)))

    @classmethod
    def from_tensors(cls, x: Tensor, y: Tensor) -> Moments:
        """Return the sums over pairs [N], in float64."""
        x, y = x.double(), y.double()
        return cls(len(x), *(float(sums) for sums in (x.sum(), y.sum(), x @ x, y @ y, x @ y)))

    def plus(self, moments: Moments) -> Moments:
        """Return the sums over the pairs of both."""
        return Moments(*map(add, self, moments))

    def centered(self) -> Moments:
        """Return the sums over the same pairs minus their means; rounding errors of a constant x or y become 0."""
        if not self.pairs:
            return self
        xx = self.xx - self.x**2 / self.pairs
        yy = self.yy - self.y**2 / self.pairs
        xx *= xx > ROUNDING * self.xx
        yy *= yy > ROUNDING * self.yy
        return Moments(self.pairs, 0.0, 0.0, xx, yy, self.xy - self.x * self.y / self.pairs)

    @property
    def correlation(self) -> float:
        """Pearson's correlation, between -1 and 1; NaN if x or y is constant."""
        centered = self.centered()
        if not (centered.xx > 0 and centered.yy > 0):
            return float("nan")
        return max(-1.0, min(1.0, centered.xy / sqrt(centered.xx) / sqrt(centered.yy)))

    @property
    def explained_variance(self) -> float:
        """1 - var(y - x) / (var(y) + 1e-5), the share of y that x explains; NaN for less than two pairs."""
        if self.pairs < 2:
            return float("nan")
        centered, freedom = self.centered(), self.pairs - 1
        residual = centered.xx + centered.yy - 2 * centered.xy
        return 1 - residual / freedom / (centered.yy / freedom + 1e-5)


def repeated_ngrams(tokens: Sequence[int]) -> tuple[int, int]:
    """Return the number of 4-grams that occurred before in the same tokens, and the number of all 4-grams."""
    count = max(0, len(tokens) - 3)
    return count - len(set(zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False))), count


def _resampled_means(values: Sequence[float], seed: int) -> NDArray[np.float64]:
    """Return the means [DRAWS] of samples of the same size, drawn with replacement."""
    sample, generator = np.array(values, dtype=np.float64), np.random.RandomState(seed)
    rows = max(1, 2**22 // len(sample))
    means = [
        sample[_draws(generator, len(sample), min(rows, DRAWS - start), len(sample))].mean(1)
        for start in range(0, DRAWS, rows)
    ]
    return np.concatenate(means)


def _draws(generator: np.random.RandomState, below: int, rows: int, columns: int) -> NDArray[np.uint32]:
    """Draw whole numbers [rows, columns] as `torch.randint` does: the remainders of the Mersenne Twister's."""
    return (np.frombuffer(generator.bytes(4 * rows * columns), "<u4") % below).reshape(rows, columns)

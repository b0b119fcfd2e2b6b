"""How far a reward agrees with labels of the same completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import isfinite

import numpy as np

from rlkit.base.errors import RecipeError
from rlkit.ops.statistics import Moments
from rlkit.records.rows import SavedRow
from rlkit.types import JsonObject

RIGHT = 0.5
"""A reward of at least this much says that a completion is right, if labels are 0 and 1."""


@dataclass
class Agreement:
    """Rewards and labels, collected group by group.

    Args:
        label: Column with the labels, numbers or booleans: of the row itself, or else of its data.
    """

    label: str
    rewards: list[float] = field(default_factory=list)
    labels: list[float] = field(default_factory=list)
    pairs: int = 0
    """Pairs of samples of a prompt with different labels."""
    ordered_alike: float = 0.0
    """Pairs in which the sample with the larger label has the larger reward; equal rewards count half."""

    def add(self, rows: Sequence[SavedRow]) -> None:
        """Take part with the samples of a prompt that have a label and a new reward."""
        labelled = [(self._label(row), row.trajectory.reward) for row in rows if not row.failed]
        scored = [(label, reward) for label, reward in labelled if label is not None and reward is not None]
        self.labels += [label for label, _ in scored]
        self.rewards += [reward for _, reward in scored]
        for (label, reward), (other_label, other_reward) in combinations(scored, 2):
            if label != other_label:
                self.pairs += 1
                product = (label - other_label) * (reward - other_reward)
                self.ordered_alike += 0.5 if reward == other_reward else float(product > 0)

    def _label(self, row: SavedRow) -> float | None:
        value = row.columns.get(self.label, row.trajectory.prompt.meta.get(self.label))
        return float(value) if isinstance(value, int | float) and isfinite(value) else None

    def metrics(self) -> JsonObject:
        """Return the metrics as JSON holds them; null where there is none.

        Raises:
            RecipeError: No row has both a label and a reward.
        """
        if not self.labels:
            raise RecipeError(
                f"--label is {self.label!r}, but no row has a reward and a number in this column; expected a column of "
                "the rows, or of their `meta`, with numbers or booleans"
            )
        binary = set(self.labels) <= {0.0, 1.0}
        right = [(reward >= RIGHT) == label for reward, label in zip(self.rewards, self.labels, strict=True)]
        correlations = (
            Moments.from_pairs(self.rewards, self.labels).correlation,
            rank_correlation(self.rewards, self.labels),
        )
        correlation, rank = (value if isfinite(value) else None for value in correlations)
        return {
            "label": self.label,
            "rows": len(self.labels),
            "accuracy": sum(right) / len(right) if binary else None,
            "correlation": correlation,
            "rank_correlation": rank,
            "pairs": self.pairs,
            "pairs_ordered_alike": self.ordered_alike / self.pairs if self.pairs else None,
        }

    def lines(self) -> Iterator[str]:
        """Yield the metrics as text.

        Raises:
            RecipeError: No row has both a label and a reward.
        """
        metrics = self.metrics()
        yield f"{metrics['rows']:,} rows have a reward and the label {self.label!r}"
        if metrics["accuracy"] is not None:
            yield f"accuracy {metrics['accuracy']:.1%} (a reward of at least {RIGHT} means 1)"
        if metrics["correlation"] is not None and metrics["rank_correlation"] is not None:
            yield f"correlation {metrics['correlation']:.3f}, by ranks {metrics['rank_correlation']:.3f}"
        else:
            yield f"no correlation: all {'rewards' if len(set(self.rewards)) < 2 else 'labels'} are equal"
        if self.pairs:
            share = metrics["pairs_ordered_alike"]
            yield f"{share:.1%} of {self.pairs:,} pairs of samples of a prompt are ordered alike; chance is 50%"


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Return Spearman's rank correlation (1904); equal values share the mean of their ranks."""
    return Moments.from_pairs(_ranks(x), _ranks(y)).correlation


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the ranks of values, relative to the mean rank."""
    _, inverse, counts = np.unique(np.array(values, dtype=np.float64), return_inverse=True, return_counts=True)
    last_rank = counts.cumsum()
    ranks: list[float] = ((2 * last_rank - counts - len(values)) / 2)[inverse].tolist()
    return ranks

"""Metrics of a step, gathered from micro-batches and ranks."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isfinite

import torch
from torch import Tensor

from rlkit.distributed.ranks import Ranks
from rlkit.ops.statistics import Moments


class Meter:
    """Collects weighted means, sums, maxima and correlations of a step over micro-batches and ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._maxima: dict[str, float] = {}
        self._pairs: dict[str, Moments] = defaultdict(Moments)

    def mean(self, name: str, value: float | Tensor, weight: float = 1.0) -> None:
        """Add a value to a mean, in which it counts `weight` times."""
        if weight > 0:
            self._sums[name][0] += float(value) * weight
            self._sums[name][1] += weight

    def means(self, name: str, values: Sequence[float]) -> None:
        """Add values to a mean."""
        for value in values:
            self._sums[name][0] += value
        if values:
            self._sums[name][1] += len(values)

    def count(self, name: str, value: float) -> None:
        """Add to a sum."""
        self._sums[name][0] += value

    def max(self, name: str, value: float | Tensor) -> None:
        """Take part in a maximum."""
        self._maxima[name] = max(float(value), self._maxima.get(name, float("-inf")))

    def correlate(self, name: str, pairs: Moments) -> None:
        """Add pairs to a correlation, of which there is no metric where one side is constant."""
        self._pairs[name] = self._pairs[name].plus(pairs)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Log the seconds of a phase as `time/PHASE`, and name it in profiles."""
        start = time.perf_counter()
        with torch.profiler.record_function(phase):
            yield
        self.max(f"time/{phase}", time.perf_counter() - start)

    def result(self, ranks: Ranks) -> dict[str, float]:
        """Return all metrics over all ranks, the same on each; every rank must call this."""
        total = Meter()
        for sums, maxima, pairs in ranks.gather_dp((dict(self._sums), self._maxima, dict(self._pairs))):
            for name, (value, weight) in sums.items():
                total._sums[name][0] += value
                total._sums[name][1] += weight
            for name, value in maxima.items():
                total.max(name, value)
            for name, moments in pairs.items():
                total._pairs[name] = total._pairs[name].plus(moments)
        metrics = {name: value / weight if weight else value for name, (value, weight) in total._sums.items()}
        correlations = {name: moments.correlation for name, moments in total._pairs.items()}
        metrics |= {name: value for name, value in correlations.items() if isfinite(value)}
        # those of a tensor-parallel group may differ, since the first one samples for all
        return ranks.broadcast_tp(dict(sorted((metrics | total._maxima).items())))

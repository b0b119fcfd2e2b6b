"""Metrics of a step, gathered from micro-batches and ranks, and those of rollouts, rewards and advantages."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from itertools import chain
from math import ceil, isfinite

import torch
from torch import Tensor

from rlkit.distributed.ranks import Ranks
from rlkit.interfaces.placement import Sums
from rlkit.ops.groups import group_stats
from rlkit.ops.masked import masked_mean
from rlkit.ops.statistics import Moments, repeated_ngrams
from rlkit.records.sources import MAX_SOURCES, source_of
from rlkit.types import Prompt, StopReason, TrainBatch, Trajectory

NVTX: ContextVar[bool] = ContextVar("NVTX", default=False)
"""Whether phases are NVTX ranges, too."""


@contextmanager
def phase_range(phase: str) -> Iterator[None]:
    """Name a phase in profiles of torch, and of Nsight Systems where `NVTX` is set."""
    nvtx = torch.cuda.nvtx.range(phase) if NVTX.get() else nullcontext()
    with torch.profiler.record_function(phase), nvtx:
        yield


class Meter:
    """Collects weighted means, sums, extremes, correlations and fits of a step over micro-batches and ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = defaultdict(partial(list, (0.0, 0.0)))
        """Sums of weighted values, and of their weights."""
        self._maxima: dict[str, float] = {}
        self._minima: dict[str, float] = {}
        self._pairs: dict[str, Moments] = defaultdict(Moments)
        self._fits: dict[str, Moments] = defaultdict(Moments)
        self._partial: set[str] = set()

    def mean(self, name: str, value: float | Tensor, weight: float = 1.0) -> None:
        """Add a value to a mean, in which it counts `weight` times."""
        if weight > 0:
            self._sums[name][0] += float(value) * weight
            self._sums[name][1] += weight

    def means(self, name: str, values: Sequence[float], *, partial: bool = False) -> None:
        """Add values to a mean; if a `partial` one has fewer than `reward/mean`, `NAME/samples` is their number."""
        if partial:
            self._partial.add(name)
        if values:
            total = self._sums[name]
            total[0] += sum(values)
            total[1] += len(values)

    def take_sums(self) -> Sums:
        """Return the sums of values and of weights that `mean` and `count` have collected."""
        return dict(self._sums)

    def add_sums(self, sums: Sums) -> None:
        """Add those of another meter."""
        for name, (value, weight) in sums.items():
            self._sums[name][0] += value
            self._sums[name][1] += weight

    def count(self, name: str, value: float) -> None:
        """Add to a sum."""
        self._sums[name][0] += value

    def max(self, name: str, value: float | Tensor) -> None:
        """Take part in a maximum."""
        self._maxima[name] = max(float(value), self._maxima.get(name, float("-inf")))

    def min(self, name: str, value: float) -> None:
        """Take part in a minimum."""
        self._minima[name] = min(value, self._minima.get(name, float("inf")))

    def correlate(self, name: str, pairs: Moments) -> None:
        """Add pairs to a correlation, of which there is no metric where one side is constant."""
        self._pairs[name] = self._pairs[name].plus(pairs)

    def explain(self, name: str, pairs: Moments) -> None:
        """Add pairs (x, y) to the share of the variance of y that x explains; less than two have none."""
        self._fits[name] = self._fits[name].plus(pairs)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Log the seconds of a phase as `time/PHASE`, all its parts together, and name it in profiles."""
        start = time.perf_counter()
        with phase_range(phase):
            yield
        before = self._maxima.get(f"time/{phase}", 0.0)
        self.max(f"time/{phase}", before + time.perf_counter() - start)

    def result(self, ranks: Ranks) -> dict[str, float]:
        """Return all metrics over all ranks, the same on each; every rank must call this."""
        total = Meter()
        for meter in ranks.gather_dp(self):
            total._partial |= meter._partial
            total.add_sums(meter._sums)
            for name, value in meter._maxima.items():
                total.max(name, value)
            for name, value in meter._minima.items():
                total.min(name, value)
            for name, moments in meter._pairs.items():
                total.correlate(name, moments)
            for name, moments in meter._fits.items():
                total.explain(name, moments)
        metrics = {name: value / weight if weight else value for name, (value, weight) in total._sums.items()}
        counts = {name: total._sums[name][1] for name in (*total._partial, "reward/mean")}
        metrics |= {f"{name}/samples": counts[name] for name in total._partial if counts[name] < counts["reward/mean"]}
        derived = {name: moments.correlation for name, moments in total._pairs.items()}
        derived |= {name: moments.explained_variance for name, moments in total._fits.items()}
        metrics |= {name: value for name, value in derived.items() if isfinite(value)}
        # those with the same rows may differ, since the first one samples for all
        return ranks.broadcast_tp(dict(sorted((metrics | total._maxima | total._minima).items())))


MEASURED_COMPLETIONS = 64
"""About so many completions of a step, on each rank, are searched for repetitions."""

MEASURED_TOKENS = 2**15
"""About so many tokens of a step, on each rank, are searched for repetitions."""


def has_no_opinion(trajectory: Trajectory) -> bool:
    """Whether the reward has no opinion on a trajectory, which is then left out of its group."""
    return trajectory.error is None and trajectory.score is not None and trajectory.score.abstains


def describe_rollouts(trajectories: Sequence[Trajectory], rewarded: bool, meter: Meter) -> None:
    """Count failures, and take the means of what is complete.

    Args:
        trajectories: All of this rank.
        rewarded: Whether to log rewards; those of recorded completions say nothing of the policy.
        meter: Takes the metrics.
    """
    rewards = [t.reward for t in trajectories]
    abstained = [t for t in trajectories if has_no_opinion(t)]
    pairs = zip(trajectories, rewards, strict=True)
    unscored = [t for t, reward in pairs if t.error is None and reward is None and not has_no_opinion(t)]
    meter.count("rollout/samples", len(trajectories))
    meter.count("rollout/failed", sum(t.error is not None for t in trajectories))
    meter.count("reward/failed", len(unscored))
    meter.count("reward/no_opinion", len(abstained))
    meter.count("reward/ungradable", sum(t.score is not None and t.score.ungradable for t in trajectories))
    meter.count("reward/groups_dropped", len({t.group for t in unscored}))
    lengths = [t.response_length for t in trajectories]
    branches = [branch for t in trajectories for branch in t.span.branches]
    meter.count("rollout/tokens", sum(lengths) + sum(branch.response_length for branch in branches))
    meter.means("rollout/length", lengths)
    meter.means("conversation/turns", [len(t.turn_rewards) for t in trajectories])
    meter.means("rollout/stopped", [t.stop is StopReason.STOP for t in trajectories])
    if lengths:
        meter.max("rollout/length_max", max(lengths))
    for trajectory in trajectories:
        for name, count in trajectory.counts.items():
            meter.count(f"conversation/{name}", count)
        for name, values in trajectory.metrics.items():
            meter.means(name, values)
    if rewarded:
        _describe_scores(trajectories, rewards, meter)


def _describe_scores(trajectories: Sequence[Trajectory], rewards: Sequence[float | None], meter: Meter) -> None:
    components: dict[str, list[float]] = defaultdict(list)
    roles: dict[str, list[float]] = defaultdict(list)
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        if trajectory.score is None or reward is None:
            continue
        for sample in trajectory.samples:
            if sample.span.role:
                roles[sample.span.role].append(sum(sample.turn_rewards))
        for name, value in trajectory.score.components.items():
            components[name].append(value)
    numbers = [reward for reward in rewards if reward is not None]
    meter.means("reward/mean", numbers)
    for value in (*numbers, *chain.from_iterable(roles.values())):  # of games that sum to 0, those of roles differ
        meter.min("reward/min", value)
        meter.max("reward/max", value)
    for name, values in components.items():
        meter.means("accuracy" if name == "accuracy" else f"reward/{name}", values, partial=True)
    for role, values in roles.items():
        meter.means(f"reward/role/{role}", values)


def describe_texts(trajectories: Sequence[Trajectory], grouped: bool, meter: Meter) -> None:
    """Measure signs of a policy that exploits its reward: long, truncated and repetitive completions.

    Args:
        trajectories: All of this rank; those that failed or have no reward are ignored.
        grouped: Whether a prompt has several samples: length and reward are then compared within each group.
        meter: Takes the metrics.
    """
    rewards = [(t, t.reward) for t in trajectories if t.error is None]
    scored = [(t, reward) for t, reward in rewards if reward is not None]
    finished = [reward for t, reward in scored if t.stop is StopReason.STOP]
    truncated = [reward for t, reward in scored if t.stop.truncated]
    meter.means("rollout/reward_finished", finished)
    meter.means("rollout/reward_truncated", truncated)
    meter.mean("rollout/truncated", len(truncated) / max(len(scored), 1), len(scored))
    groups: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for trajectory, reward in scored:
        groups[trajectory.group].append((trajectory.response_length, reward))
    for group in groups.values():
        pairs = Moments.from_pairs(*zip(*group, strict=True))
        meter.correlate("reward/length_correlation", pairs.centered() if grouped else pairs)
    tokens = sum(len(t.tokens) for t, _ in scored)
    stride = max(1, ceil(max(len(scored) / MEASURED_COMPLETIONS, tokens / MEASURED_TOKENS)))
    repetitions = [_repetition(t) for t, _ in scored[::stride]]
    meter.means("rollout/repetition", [share for share in repetitions if share is not None])


def _repetition(trajectory: Trajectory) -> float | None:
    """Return the share of runs of four tokens that occurred before in the same turn; None if there are none."""
    repeated_runs = runs = 0
    for role, start, end in trajectory.turns:
        if role == "assistant":
            in_turn = repeated_ngrams(trajectory.tokens[start:end])
            repeated_runs += in_turn[0]
            runs += in_turn[1]
    return repeated_runs / runs if runs else None


def describe_rewards(batch: TrainBatch, meter: Meter) -> None:
    """Log the spread of rewards within groups."""
    rollouts = batch.rollouts()
    stats = group_stats(rollouts.rewards, rollouts.group)
    meter.means("reward/std", stats.std.tolist())
    meter.means("groups/no_signal", stats.equal[stats.size > 1].float().tolist())


def describe_advantages(batch: TrainBatch, meter: Meter) -> None:
    """Log the advantages, and how well the critic fits the returns."""
    meter.count("advantage/not_finite", float((~batch.advantages.isfinite() & batch.mask).sum()))
    if len(batch):
        meter.max("advantage/max", batch.advantages.max())
        tokens = float(batch.mask.sum())
        meter.mean("advantage/abs_mean", masked_mean(batch.advantages.abs(), batch.mask), tokens)
    if batch.values is not None and batch.returns is not None:
        pairs = Moments.from_tensors(batch.values[batch.mask], batch.returns[batch.mask])
        meter.explain("critic/explained_variance", pairs)


def log_by_source(log: Callable[[str, float], None], name: str, values: Sequence[tuple[Prompt, float]]) -> None:
    """Log a value of each prompt, and again as `name/SOURCE` unless there are too many sources.

    Args:
        log: Takes a name and a value, as `Meter.mean` and `Meter.count` do.
        name: Name of the metric.
        values: Prompts with their values.
    """
    by_source = len({source_of(prompt) for prompt, _ in values}) <= MAX_SOURCES
    for prompt, value in values:
        log(name, value)
        source = source_of(prompt)
        if by_source and source:
            log(f"{name}/{source}", value)

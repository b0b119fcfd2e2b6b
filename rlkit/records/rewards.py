"""What the rewards of a run tell: their change, and why there may be nothing to learn from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, sqrt
from statistics import fmean, variance
from typing import TypedDict

from rlkit.base.ranges import LARGEST_FLOAT
from rlkit.base.text import counted
from rlkit.records.lines import nine_digits

PERIOD = 20
"""Steps at the start and at the end whose mean rewards are compared, in a short run at most half of its steps."""
SAME_REWARD_STEPS = 5
"""Steps in which all samples earn the same before a run says so."""
NEVER_RIGHT_STEPS = 20
"""Steps in which no sample is right before a run says so, if rewards differ: the policy may learn a form first."""
SAMPLES_LEFT_OUT = ("rollout/failed", "reward/failed", "reward/no_opinion")
"""Metrics that count samples without a reward."""
REWARD_METRICS = ("reward/mean", "reward/min", "reward/max", "accuracy", "rollout/samples", *SAMPLES_LEFT_OUT)
"""The metrics of a step that tell of its rewards."""
TOO_HARD = (
    "read some completions (rlkit report): if they are right, the reward does not extract their answers; if they are "
    "wrong, choose easier prompts or a stronger model"
)
TOO_EASY = "choose harder prompts"
NOT_TOLD_APART = "choose a reward that tells completions apart"


class MeanReward(TypedDict):
    """The mean reward of some steps, with the bounds of its 95% interval; without bounds if there is one step."""

    mean: float
    low: float | None
    high: float | None
    steps: int


class RewardChange(TypedDict):
    """The mean rewards at the start and at the end of a run."""

    first: MeanReward
    last: MeanReward


@dataclass
class RewardHistory:
    """Collects the rewards of a run's steps from their metrics.

    Args:
        steps: The number of steps with rewards.
        silent_steps: The number of those in which the reward has no opinion on any sample.
        samples: The number of their samples that have a reward.
        lowest: The smallest reward.
        highest: The largest reward.
        accuracies: The lowest and the highest accuracy of a step; None without accuracy.
        first: Mean rewards of the first steps.
        last: Mean rewards of the last steps.
    """

    steps: int = 0
    silent_steps: int = 0
    samples: int = 0
    lowest: float = inf
    highest: float = -inf
    accuracies: tuple[float, float] | None = None
    first: list[float] = field(default_factory=list)
    last: deque[float] = field(default_factory=lambda: deque(maxlen=PERIOD))

    def see(self, metrics: Mapping[str, float]) -> None:
        """Count a step; one without rewards, or with numbers that no run logs, counts for nothing.

        Of a step that an earlier version has logged, without the smallest and the largest reward, they are unknown.
        """
        numbers = [metrics[name] for name in REWARD_METRICS if name in metrics]
        self.silent_steps += 0 < metrics.get("rollout/samples", 0) == metrics.get("reward/no_opinion")
        if "reward/mean" not in metrics or not all(abs(number) <= LARGEST_FLOAT for number in numbers):
            return
        self.steps += 1
        self.samples += round(metrics.get("rollout/samples", 0) - sum(metrics.get(n, 0) for n in SAMPLES_LEFT_OUT))
        self.lowest = min(self.lowest, _rounded(metrics.get("reward/min", -inf)))
        self.highest = max(self.highest, _rounded(metrics.get("reward/max", inf)))
        if "accuracy" in metrics:
            low, high = self.accuracies or (inf, -inf)
            self.accuracies = min(low, metrics["accuracy"]), max(high, metrics["accuracy"])
        if len(self.first) < PERIOD:
            self.first.append(metrics["reward/mean"])
        self.last.append(metrics["reward/mean"])

    def problem(self, *, is_over: bool = False) -> str | None:
        """Explain why the run has nothing to learn from, and what to do; None if it has, or if it is too early to tell.

        Args:
            is_over: Whether there will be no further step, so that even a few tell.
        """
        if not self.steps and self.silent_steps >= (1 if is_over else SAME_REWARD_STEPS):
            return f"no opinion in all samples of {counted(self.silent_steps, 'step')}: the reward must return numbers"
        count = f"in all {self.samples:,} samples of {counted(self.steps, 'step')}"
        if self.samples > 1 and self.lowest == self.highest and (is_over or self.steps >= SAME_REWARD_STEPS):
            low, high = self.accuracies or (self.lowest, self.highest)
            remedy = TOO_HARD if high <= 0 else TOO_EASY if low == 1 else NOT_TOLD_APART
            return f"reward {self.lowest:g} {count}, so there is nothing to learn: {remedy}"
        never_right = self.accuracies is not None and self.accuracies[1] <= 0
        if self.samples > 1 and never_right and (is_over or self.steps >= NEVER_RIGHT_STEPS):
            return f"accuracy 0 {count}, although rewards differ ({self.lowest:g} to {self.highest:g}): {TOO_HARD}"
        return None

    def change(self) -> RewardChange | None:
        """Return the mean rewards at the start and at the end; None without steps."""
        if not self.steps:
            return None
        size = max(1, min(PERIOD, self.steps // 2))
        return {"first": _mean(self.first[:size]), "last": _mean(list(self.last)[-size:])}


def _mean(rewards: list[float]) -> MeanReward:
    mean = fmean(rewards)
    if len(rewards) < 2:
        return {"mean": mean, "low": None, "high": None, "steps": len(rewards)}
    half = 1.96 * sqrt(variance(rewards) / len(rewards))
    return {"mean": mean, "low": mean - half, "high": mean + half, "steps": len(rewards)}


def repeats(warning: str, diagnosis: str | None) -> bool:
    """Whether a warning says of fewer steps what a diagnosis says at the end."""
    return diagnosis is not None and warning.startswith(f"warning: {diagnosis.partition(' in all ')[0]} in all ")


def mean_text(reward: MeanReward) -> str:
    """Return a mean reward with its interval as text."""
    bounds = "" if reward["low"] is None else f" ({reward['low']:.2f}-{reward['high']:.2f})"
    return f"{reward['mean']:.3f}{bounds}"


LOW_SCORE, HIGH_SCORE = 0.2, 0.8
"""Mean accuracies or rewards up to which prompts are too hard, and from which they are too easy."""


def advice_on_prompts(score: float | None) -> str:
    """Return advice on prompts whose samples earn the same, by a mean accuracy or reward from 0 to 1."""
    if score is not None and 0 <= score <= LOW_SCORE:
        return "choose easier prompts, "
    return "choose harder prompts, " if score is not None and HIGH_SCORE <= score <= 1 else ""


def _rounded(reward: float) -> float:
    """Return a reward as logged, without the rounding errors of sums: 0.3 for 0.1 + 0.2, 0 for -5.6e-17."""
    return nine_digits(round(reward, 9)) + 0.0

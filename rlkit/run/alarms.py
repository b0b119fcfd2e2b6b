"""Warnings about metrics that look wrong, each shown once with a remedy, and what the rewards of a run tell."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite, nan, sqrt
from statistics import fmean, variance
from typing import TYPE_CHECKING, TypedDict

from rlkit.base.ranges import LARGEST_FLOAT

if TYPE_CHECKING:  # a report tells of rewards without torch
    from rlkit.recipe import Recipe

GAP_STEPS = 5
MAX_GAP = 0.01
"""KL between engine and trainer, in nats per token, averaged over the last `GAP_STEPS`."""

TRUNCATED_STEPS = 10
MAX_TRUNCATED = 0.5
"""Fraction of completions that the limit of tokens truncated, averaged over the last `TRUNCATED_STEPS`."""

EQUAL_STEPS = 10
MAX_EQUAL = 0.8
"""Fraction of groups whose samples all have the same reward, averaged over the last `EQUAL_STEPS`."""

FIRST_STEPS = 5
ENTROPY_STEPS = 10
ENTROPY_RATIO = 0.2
"""Entropy of the last `ENTROPY_STEPS`, relative to that of the first `FIRST_STEPS`, below which it has collapsed."""
ERROR_RATIO = 0.5
"""Wrong completions, relative to the first steps, up to which low entropy is harmless: the policy has learned."""

WATCHED = ("mismatch/k3", "rollout/truncated", "groups/no_signal", "policy/entropy", "reward/mean", "accuracy")


@dataclass
class Alarms:
    """Collects metrics of steps; checkpoints do not hold them.

    Args:
        recipe: The run's recipe, which determines what a metric means.
        recent: The last values of metrics, by name.
        first: The values of the first steps, by name.
        warned: Names of the checks that have warned.
    """

    recipe: Recipe
    recent: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=10)))
    first: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    warned: set[str] = field(default_factory=set)

    def see(self, metrics: Mapping[str, float]) -> Iterator[str]:
        """Count a step; yield warnings."""
        for name in WATCHED:
            if isfinite(metrics.get(name, nan)):
                self.recent[name].append(metrics[name])
                if len(self.first[name]) < FIRST_STEPS:
                    self.first[name].append(metrics[name])
        checks = {"gap": self._gap, "truncated": self._truncated, "equal": self._equal, "entropy": self._entropy}
        for name, check in checks.items():
            problem = None if name in self.warned else check()
            if problem is not None:
                self.warned.add(name)
                yield f"warning: {problem}"

    def _mean(self, name: str, steps: int) -> float | None:
        """Return the mean of a metric over the last steps; None if there were fewer steps."""
        values = self.recent[name]
        return fmean(list(values)[-steps:]) if len(values) >= steps else None

    def _gap(self) -> str | None:
        gap = self._mean("mismatch/k3", GAP_STEPS)
        if gap is None or gap <= MAX_GAP:
            return None
        remedy = "compute rollouts in the trainer's precision"
        if self.recipe.correction is None and self.recipe.rejection is None:
            remedy += ", or weight tokens by the gap (correction: {high: 2.0}), or reject the worst (rejection)"
        return (
            f"engine and trainer are {gap:.3g} nats a token apart (mismatch/k3, mean of {GAP_STEPS} steps; expected at "
            f"most {MAX_GAP}), so the samples are not those of the policy that is trained: {remedy}"
        )

    def _truncated(self) -> str | None:
        share = self._mean("rollout/truncated", TRUNCATED_STEPS)
        if share is None or share <= MAX_TRUNCATED:
            return None
        return (
            f"{share:.0%} of the completions of {TRUNCATED_STEPS} steps were truncated by the limit of tokens "
            "(rollout/truncated), so their rewards say little: raise rollout.sampling.max_tokens, or check that the "
            "chat template ends a completion with a stop token (rlkit data show)"
        )

    def _equal(self) -> str | None:
        share = self._mean("groups/no_signal", EQUAL_STEPS)
        if share is None or share <= MAX_EQUAL or not self.recipe.compares_groups:
            return None
        reward, accuracy = self._mean("reward/mean", 1), self._mean("accuracy", 1)
        earned = "" if reward is None else f", with a mean reward of {reward:.2f}"
        remedy = self.recipe.method.equal_rewards.format(
            remedy=f"{advice_on_prompts(reward if accuracy is None else accuracy)}draw prompts by success (curriculum: "
            "SuccessRate), replace such groups (rollout.filter: ZeroSignal), or raise rollout.group_size"
        )
        return (
            f"in {share:.0%} of the groups of {EQUAL_STEPS} steps all samples earned the same (groups/no_signal)"
            f"{earned}, so most of the work taught nothing: {remedy}"
        )

    def _entropy(self) -> str | None:
        entropy = self._mean("policy/entropy", ENTROPY_STEPS)
        if entropy is None:
            return None
        first_entropy = fmean(self.first["policy/entropy"])
        if entropy >= ENTROPY_RATIO * first_entropy:
            return None
        accuracy = self._mean("accuracy", ENTROPY_STEPS)
        if accuracy is not None and 1 - accuracy <= ERROR_RATIO * (1 - fmean(self.first["accuracy"])):
            return None
        return (
            f"the policy's entropy fell from {first_entropy:.3g} to {entropy:.3g} nats a token (policy/entropy), so "
            "its samples of a prompt hardly differ any more: lower train.lr, raise loss.clip_high, or add "
            "train.entropy_coef"
        )


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
        samples: The number of their samples that have a reward.
        lowest: The smallest reward.
        highest: The largest reward.
        accuracies: The lowest and the highest accuracy of a step; None without accuracy.
        first: Mean rewards of the first steps.
        last: Mean rewards of the last steps.
    """

    steps: int = 0
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
        count = f"in all {self.samples:,} samples of {self.steps:,} step{'s' * (self.steps != 1)}"
        if self.samples > 1 and self.lowest == self.highest and (is_over or self.steps >= SAME_REWARD_STEPS):
            return f"reward {self.lowest:g} {count}, so there is nothing to learn: {self._remedy()}"
        never_right = self.accuracies is not None and self.accuracies[1] <= 0
        if self.samples > 1 and never_right and (is_over or self.steps >= NEVER_RIGHT_STEPS):
            return f"accuracy 0 {count}, although rewards differ ({self.lowest:g} to {self.highest:g}): {TOO_HARD}"
        return None

    def _remedy(self) -> str:
        low, high = self.accuracies or (self.lowest, self.highest)
        if high <= 0:
            return TOO_HARD
        return TOO_EASY if low == 1 else NOT_TOLD_APART

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
    """Return a reward without the rounding errors of sums: 0.3 for 0.1 + 0.2, 0 for -5.6e-17."""
    return round(reward, 9) + 0.0

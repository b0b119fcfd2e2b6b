"""Warnings about signs that the policy exploits its reward instead of learning the task, each shown once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean, variance

from rlkit.run.alarms import new_warnings

LENGTH_STEPS = 50
"""Steps to observe: more than a policy needs to find out that it must show its work, or call a tool."""
LENGTH_CORRELATION = 0.5
"""Correlation of length and reward at which length alone explains a quarter of the variance of the rewards."""

TRUNCATED_STEPS = 20
"""Steps to observe: more than a policy needs to leave a bad start."""
TRUNCATED_SHARE = 0.1
"""Fraction of truncated completions from which their rewards matter."""

RISE_STEPS = 5
"""Steps in each of two periods whose mean rewards are compared."""
RISE_ERRORS = 3.0
"""Standard errors by which the means of the periods differ if the reward has risen."""
RISE_SPREAD = 0.25
"""The smallest rise that counts, as a fraction of the standard deviation of a prompt's rewards."""

LATER_VALIDATIONS = 2
"""Validations after a rise that must show no improvement."""
MAX_ACCURACY = 0.95
"""Accuracy above which no improvement can be expected."""


@dataclass
class RewardChecks:
    """Collects metrics of steps and validations; checkpoints do not hold them.

    Args:
        lengths: Correlations of length and reward within groups, of the last steps.
        truncated: Of the last steps with truncated completions: their fraction, their mean reward, and the mean reward
            of finished completions.
        spread: The mean standard deviation of a prompt's rewards, by step.
        rewards: Mean rewards of steps: one list for the steps up to each validation, and one for the steps since.
        accuracies: Accuracies of the validations.
        warned: Names of the checks that have warned.
    """

    lengths: deque[float] = field(default_factory=lambda: deque(maxlen=LENGTH_STEPS))
    truncated: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=TRUNCATED_STEPS))
    spread: deque[float] = field(default_factory=lambda: deque(maxlen=LENGTH_STEPS))
    rewards: list[list[float]] = field(default_factory=lambda: [[]])
    accuracies: list[float] = field(default_factory=list)
    warned: set[str] = field(default_factory=set)

    def validated(self, metrics: Mapping[str, float]) -> None:
        """Count a validation; called before `see` for the step that it follows."""
        if "accuracy" in metrics:
            self.accuracies.append(metrics["accuracy"])
            self.rewards.append([])

    def see(self, metrics: Mapping[str, float]) -> Iterator[str]:
        """Count a step; yield warnings."""
        if "reward/mean" in metrics:
            self.rewards[-1].append(metrics["reward/mean"])
        self.spread.append(metrics.get("reward/std", 0.0))
        if "reward/length_correlation" in metrics:
            self.lengths.append(metrics["reward/length_correlation"])
        truncated = metrics.get("rollout/reward_truncated")
        finished = metrics.get("rollout/reward_finished")
        if truncated is not None and finished is not None:
            self.truncated.append((metrics["rollout/truncated"], truncated, finished))
        checks = {"length": self._length, "truncated": self._truncated, "rise": self._rise}
        yield from new_warnings(checks, self.warned)

    def _length(self) -> str | None:
        if len(self.lengths) < LENGTH_STEPS or self._improved:
            return None
        correlation = fmean(self.lengths)
        if correlation < LENGTH_CORRELATION:
            return None
        return (
            f"in {LENGTH_STEPS} steps longer completions earned more (correlation of length and reward "
            f"{correlation:.2f}), and no validation shows that they are better: read them in rollouts/, take length "
            "out of the reward, or set validation.every to see whether accuracy rises"
        )

    def _truncated(self) -> str | None:
        if len(self.truncated) < TRUNCATED_STEPS or not any(self.spread):
            return None
        share, truncated, finished = (fmean(column) for column in zip(*self.truncated, strict=True))
        if share < TRUNCATED_SHARE or truncated < finished:
            return None
        return (
            f"in {TRUNCATED_STEPS} steps {share:.0%} of the completions were truncated by the limit of tokens, and "
            f"earned as much ({truncated:.3f}) as those that ended ({finished:.3f}): raise "
            "rollout.sampling.max_tokens, or use a reward that counts an end, such as Overlong in a Composite"
        )

    def _rise(self) -> str | None:
        """Compare the first and the last period of steps that a validation follows."""
        periods = [rewards for rewards in self.rewards[: len(self.accuracies)] if rewards]
        if len(periods) < 1 + LATER_VALIDATIONS or self._improved or self.accuracies[0] >= MAX_ACCURACY:
            return None
        first, last = periods[0], periods[-1]
        if not _risen(first, last) or fmean(last) - fmean(first) < RISE_SPREAD * fmean(self.spread):
            return None
        return (
            f"the training reward rose from {fmean(first):.3f} to {fmean(last):.3f}, but validation accuracy did not "
            f"({self.accuracies[0]:.3f} at first, {self.accuracies[-1]:.3f} now): read what is rewarded in rollouts/, "
            "try another reward on it (rlkit reward try), or bind the policy to the reference (kl_loss)"
        )

    @property
    def _improved(self) -> bool:
        """Whether one of the last validations was better than the first."""
        return any(accuracy > self.accuracies[0] for accuracy in self.accuracies[1:][-LATER_VALIDATIONS:])


def _risen(first: Sequence[float], last: Sequence[float]) -> bool:
    """Check whether the mean of `last` is higher by several standard errors (Welch 1947)."""
    if min(len(first), len(last)) < RISE_STEPS:
        return False
    error = sqrt(variance(first) / len(first) + variance(last) / len(last))
    return fmean(last) - fmean(first) > RISE_ERRORS * error

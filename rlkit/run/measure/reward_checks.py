"""Signs that the policy exploits its reward instead of learning the task, each shown once as a warning."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean, variance

LENGTH_STEPS, LENGTH_CORRELATION = 50, 0.5
"""Length alone explains a quarter of the variance of the samples' rewards: more than a few steps of a policy that finds
out that it must show its work, or call a tool."""

CUT_STEPS, CUT_SHARE = 20, 0.1
"""So many answers are cut off that what they earn counts, in more steps than a policy needs to leave a bad start."""

RISE_STEPS, RISE_ERRORS, RISE_SPREAD = 5, 3.0, 0.25
"""A reward has risen if the means of two times of at least so many steps differ by so many standard errors, and by so
much of the spread of the rewards of a prompt's samples."""

LATER_VALIDATIONS, HIGH = 2, 0.95
"""As many validations after a rise as must show none, and the accuracy above which none can be expected."""


@dataclass
class RewardChecks:
    """Collects metrics of steps and of validations; nothing of it outlasts the process.

    Args:
        lengths: Correlations of length and reward within the groups of the last steps.
        cut: Of the last steps with truncated answers their share, their mean reward, and that of finished answers.
        spread: The mean standard deviation of the rewards of a prompt's samples, by step.
        rewards: Mean rewards of steps, one list for the time up to each validation and one for the time since.
        accuracies: Of the validations.
        warned: What was warned of.
    """

    lengths: deque[float] = field(default_factory=lambda: deque(maxlen=LENGTH_STEPS))
    cut: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=CUT_STEPS))
    spread: deque[float] = field(default_factory=lambda: deque(maxlen=LENGTH_STEPS))
    rewards: list[list[float]] = field(default_factory=lambda: [[]])
    accuracies: list[float] = field(default_factory=list)
    warned: set[str] = field(default_factory=set)

    def validated(self, metrics: Mapping[str, float]) -> None:
        """Take a validation, before the step that it follows."""
        if "accuracy" in metrics:
            self.accuracies.append(metrics["accuracy"])
            self.rewards.append([])

    def see(self, metrics: Mapping[str, float]) -> Iterator[str]:
        """Take a step; yield warnings."""
        if "reward/mean" in metrics:
            self.rewards[-1].append(metrics["reward/mean"])
        self.spread.append(metrics.get("reward/std", 0.0))
        if "reward/length_correlation" in metrics:
            self.lengths.append(metrics["reward/length_correlation"])
        cut, finished = metrics.get("rollout/reward_truncated"), metrics.get("rollout/reward_finished")
        if cut is not None and finished is not None:
            self.cut.append((metrics["rollout/truncated"], cut, finished))
        for name, check in (("length", self._length), ("cut", self._cut), ("rise", self._rise)):
            if name not in self.warned and (problem := check()) is not None:
                self.warned.add(name)
                yield f"warning: {problem}"

    def _length(self) -> str | None:
        if len(self.lengths) < LENGTH_STEPS or (mean := fmean(self.lengths)) < LENGTH_CORRELATION or self._improved:
            return None
        return (
            f"in {LENGTH_STEPS} steps longer answers earned more (correlation of length and reward {mean:.2f}), and no "
            "validation shows that they are better: read them in rollouts/, take length out of the reward, or set "
            "validation.every to see whether accuracy rises"
        )

    def _cut(self) -> str | None:
        if len(self.cut) < CUT_STEPS or not any(self.spread):
            return None
        share, cut, finished = (fmean(column) for column in zip(*self.cut, strict=True))
        if share < CUT_SHARE or cut < finished:
            return None
        return (
            f"in {CUT_STEPS} steps {share:.0%} of the answers were cut off by their limit of tokens, and earned as "
            f"much ({cut:.3f}) as those that ended ({finished:.3f}): raise rollout.sampling.max_tokens, or use a "
            "reward that counts an end, such as Overlong in a Composite"
        )

    def _rise(self) -> str | None:
        """Compare the time up to the first validation after a step with that up to the last one."""
        times = [time for time in self.rewards[: len(self.accuracies)] if time]
        if len(times) < 1 + LATER_VALIDATIONS or self._improved or self.accuracies[0] >= HIGH:
            return None
        first, last = times[0], times[-1]
        if not _risen(first, last) or fmean(last) - fmean(first) < RISE_SPREAD * fmean(self.spread):
            return None
        return (
            f"the training reward rose from {fmean(first):.3f} to {fmean(last):.3f}, but validation accuracy did not "
            f"({self.accuracies[0]:.3f} at first, {self.accuracies[-1]:.3f} now): read what is rewarded in rollouts/, "
            "try another reward on it (rlkit reward try), or bind the policy to the reference (kl_loss)"
        )

    @property
    def _improved(self) -> bool:
        """Whether one of the last validations was better than the first one."""
        return any(accuracy > self.accuracies[0] for accuracy in self.accuracies[1:][-LATER_VALIDATIONS:])


def _risen(first: Sequence[float], last: Sequence[float]) -> bool:
    """Whether the mean of the second is higher by several standard errors (Welch 1947)."""
    if min(len(first), len(last)) < RISE_STEPS:
        return False
    error = sqrt(variance(first) / len(first) + variance(last) / len(last))
    return fmean(last) - fmean(first) > RISE_ERRORS * error

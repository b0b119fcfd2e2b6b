"""Warnings about metrics of steps that look wrong, each shown once with a remedy."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite, nan
from statistics import fmean
from typing import TYPE_CHECKING

from rlkit.records.rewards import advice_on_prompts

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


def new_warnings(checks: Mapping[str, Callable[[], str | None]], warned: set[str]) -> Iterator[str]:
    """Yield the problem that each check returns, unless it has warned before; add its name to `warned`."""
    for name, check in checks.items():
        problem = None if name in warned else check()
        if problem is not None:
            warned.add(name)
            yield f"warning: {problem}"


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
        yield from new_warnings(checks, self.warned)

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

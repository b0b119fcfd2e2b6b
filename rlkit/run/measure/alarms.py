"""Metrics that look wrong, each shown once as a warning with what to do about it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite, nan
from statistics import fmean

from rlkit.recipe import Recipe

GAP_STEPS, GAP = 5, 0.01
"""KL of engine and trainer, in nats a token."""

CUT_STEPS, CUT = 10, 0.5
"""Share of answers that their limit of tokens cut off."""

EQUAL_STEPS, EQUAL = 10, 0.8
"""Share of groups whose samples all have one reward."""

FIRST_STEPS, ENTROPY_STEPS, ENTROPY, WRONG = 5, 10, 0.2, 0.5
"""Of the entropy of the first steps so much is left in the last ones where it has collapsed. A policy that has learned
is sure of itself: that is no harm where so much, or less, of the wrong answers is left."""


@dataclass
class Alarms:
    """Collects metrics of steps; nothing of it outlasts the process.

    Args:
        recipe: Decides what a metric means.
        recent: The last values of metrics, by name.
        first: Metrics of the first steps, by name.
        warned: What was warned of.
    """

    recipe: Recipe
    recent: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=10)))
    first: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    warned: set[str] = field(default_factory=set)

    def see(self, metrics: Mapping[str, float]) -> Iterator[str]:
        """Take a step; yield warnings."""
        for name in (
            "mismatch/k3",
            "rollout/truncated",
            "groups/no_signal",
            "policy/entropy",
            "reward/mean",
            "accuracy",
        ):
            if isfinite(metrics.get(name, nan)):
                self.recent[name].append(metrics[name])
                self.first[name] += [metrics[name]] * (len(self.first[name]) < FIRST_STEPS)
        for name, check in (("gap", self._gap), ("cut", self._cut), ("equal", self._equal), ("entropy", self._entropy)):
            if name not in self.warned and (problem := check()) is not None:
                self.warned.add(name)
                yield f"warning: {problem}"

    def _mean(self, name: str, steps: int) -> float | None:
        """Return the mean of a metric over the last steps; None if there were not as many."""
        values = self.recent[name]
        return fmean(list(values)[-steps:]) if len(values) >= steps else None

    def _gap(self) -> str | None:
        gap = self._mean("mismatch/k3", GAP_STEPS)
        if gap is None or gap <= GAP:
            return None
        remedy = "compute rollouts in the trainer's precision"
        if self.recipe.correction is None and self.recipe.rejection is None:
            remedy += ", or weigh tokens by the gap (correction: {high: 2.0}), or leave out the worst (rejection)"
        return (
            f"engine and trainer are {gap:.3g} nats a token apart (mismatch/k3, mean of {GAP_STEPS} steps; expected at "
            f"most {GAP}), so what is learned is not of the policy that answered: {remedy}"
        )

    def _cut(self) -> str | None:
        share = self._mean("rollout/truncated", CUT_STEPS)
        if share is None or share <= CUT:
            return None
        return (
            f"{share:.0%} of the answers of {CUT_STEPS} steps were cut off by their limit of tokens "
            "(rollout/truncated), so their rewards say little: raise rollout.sampling.max_tokens, or check that the "
            "chat template ends an answer with a token that stops it (rlkit data show)"
        )

    def _equal(self) -> str | None:
        share = self._mean("groups/no_signal", EQUAL_STEPS)
        if share is None or share <= EQUAL or not self.recipe.compares_groups:
            return None
        reward = self._mean("reward/mean", 1)
        earned = "" if reward is None else f", with a mean reward of {reward:.2f}"
        remedy = (
            "choose easier or harder prompts, draw them by success (curriculum: SuccessRate), replace such groups "
            "(rollout.filter: ZeroSignal), or raise rollout.group_size"
        )
        if self.recipe.rollout.engine.recorded:
            remedy = "leave prompts out of the data whose answers have equal rewards"
        return (
            f"in {share:.0%} of the groups of {EQUAL_STEPS} steps all samples earned the same (groups/no_signal)"
            f"{earned}, so most of the work taught nothing: {remedy}"
        )

    def _entropy(self) -> str | None:
        now, right = self._mean("policy/entropy", ENTROPY_STEPS), self._mean("accuracy", ENTROPY_STEPS)
        if now is None or now >= ENTROPY * (before := fmean(self.first["policy/entropy"])):
            return None
        if right is not None and 1 - right <= WRONG * (1 - fmean(self.first["accuracy"])):
            return None
        return (
            f"the policy's entropy fell from {before:.3g} to {now:.3g} nats a token (policy/entropy), so its samples "
            "of a prompt hardly differ any more: lower train.lr, raise loss.clip_high, or add train.entropy_coef"
        )

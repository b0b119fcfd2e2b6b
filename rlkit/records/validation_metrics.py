"""The metrics of a validation, with their intervals."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from rlkit.ops.statistics import bootstrap, majority, pass_at_k, wilson
from rlkit.records.sources import MAX_SOURCES, metric_name, source_of
from rlkit.types import StopReason, Trajectory

Accuracies = dict[int, float]
"""The accuracy of each prompt, by its index: the mean over its completions."""


class GradedCompletion(NamedTuple):
    """What metrics need of a validation's completion.

    Args:
        prompt: Index of its prompt.
        source: Source of its prompt, as metrics name it.
        failed: Whether the rollout failed.
        finished: Whether the policy ended it, instead of a limit.
        length: Its tokens.
        reward: Its reward; None if there is none.
        accuracy: Its accuracy; None if there is none.
        components: Components of its score other than the accuracy.
        final: Its final answer; empty if none was found, None if the reward does not look for one.
    """

    prompt: int
    source: str
    failed: bool
    finished: bool
    length: int
    reward: float | None
    accuracy: float | None
    components: Mapping[str, float] = {}
    final: str | None = None

    @classmethod
    def of(cls, trajectory: Trajectory) -> GradedCompletion:
        """Return a scored trajectory's inputs to metrics."""
        score, reward = trajectory.score, trajectory.reward
        if score is None or reward is None:
            components, final = {}, None
        else:
            components = {metric_name(name): value for name, value in score.components.items()}
            final = score.answer
        return cls(
            trajectory.group,
            source_of(trajectory.prompt),
            trajectory.error is not None,
            trajectory.stop is StopReason.STOP,
            trajectory.response_length,
            reward,
            components.pop("accuracy", None),
            components,
            final,
        )


def metrics(completions: Sequence[GradedCompletion]) -> Iterator[tuple[str, float]]:
    """Yield the name and the value of each metric of completions.

    `accuracy` and `reward` are means over prompts of the means over their completions. The bounds of `accuracy` are
    Wilson's if each prompt has one completion, right or wrong, or if all have the same accuracy; otherwise those of a
    bootstrap over prompts. `reward` has bounds where there is no accuracy and prompts earn different rewards. Truncated
    completions count as wrong in `finished_accuracy`. `strict_accuracy` is the mean of the reward's component `strict`:
    those without the expected form count as wrong. `reward/NAME` is that of another component, unless there are many.
    """
    accuracies = by_prompt(completions)
    if accuracies:
        yield from _accuracy(completions, accuracies)
        graded = [c for c in completions if c.accuracy is not None]
        finished = [c._replace(accuracy=c.accuracy if c.finished else 0.0) for c in graded]
        yield "finished_accuracy", fmean(by_prompt(finished).values())
        strict = _means((c.prompt, c.components.get("strict")) for c in completions)
        if strict:
            yield "strict_accuracy", fmean(strict.values())
        yield from _pass_at(completions)
        yield from _majority_at(graded)
        yield from _by_source(completions)
    rewards = rewards_by_prompt(completions)
    if rewards:
        yield "reward", fmean(rewards.values())
        if not accuracies and len(set(rewards.values())) > 1:  # a bootstrap of equal values has no width
            low, high = _interval([c.reward for c in completions if c.reward is not None], rewards)
            yield "reward_low", low
            yield "reward_high", high
    components = {name for c in completions for name in c.components if name != "strict" or not accuracies}
    for name in sorted(components) if len(components) <= MAX_SOURCES else ():
        yield f"reward/{name}", fmean(_means((c.prompt, c.components.get(name)) for c in completions).values())
    if completions:
        yield "length", fmean(c.length for c in completions)
        yield "stopped", fmean(c.finished for c in completions)
    yield "failed", float(sum(c.failed for c in completions))
    yield "unscored", float(sum(not c.failed and c.reward is None for c in completions))


def order_metrics(comparisons: Sequence[GradedCompletion]) -> Iterator[tuple[str, float]]:
    """Yield the name and the value of each metric of a reward model, from its comparisons: means over prompts."""
    yield from _accuracy(comparisons, by_prompt(comparisons))
    yield "margin", fmean(comparison.components["margin"] for comparison in comparisons)
    yield from _by_source(comparisons)


def by_prompt(completions: Sequence[GradedCompletion]) -> Accuracies:
    """Return the accuracy of each prompt that has one."""
    return _means((c.prompt, c.accuracy) for c in completions)


def rewards_by_prompt(completions: Sequence[GradedCompletion]) -> dict[int, float]:
    """Return the mean reward of each prompt that has one."""
    return _means((c.prompt, c.reward) for c in completions)


def _accuracy(completions: Sequence[GradedCompletion], accuracies: Accuracies) -> Iterator[tuple[str, float]]:
    """Yield the accuracy and the bounds of its interval."""
    yield "accuracy", fmean(accuracies.values())
    low, high = _interval([c.accuracy for c in completions if c.accuracy is not None], accuracies)
    yield "accuracy_low", low
    yield "accuracy_high", high


def _interval(values: Sequence[float], means_by_prompt: Accuracies) -> tuple[float, float]:
    """Return the interval of the mean over prompts of the values of all completions."""
    means = list(means_by_prompt.values())
    single = len(values) == len(means) and set(values) <= {0.0, 1.0}
    if single or set(means) in ({0.0}, {1.0}):  # a bootstrap of equal values has no width
        return wilson(round(sum(means)), len(means))
    return bootstrap(means)


def _pass_at(completions: Sequence[GradedCompletion]) -> Iterator[tuple[str, float]]:
    """Yield pass@k for k = 2, 4, 8 ... and for the fewest completions of a prompt, if each is right or wrong.

    A prompt counts in those for which it has enough graded completions, so that one that failed renames no metric.
    """
    accuracies_of = _grouped((c.prompt, c.accuracy) for c in completions)
    if any(accuracy not in (0.0, 1.0) for accuracies in accuracies_of.values() for accuracy in accuracies):
        return
    right_of = [(len(accuracies), round(sum(accuracies))) for accuracies in accuracies_of.values()]
    fewest = min(Counter(c.prompt for c in completions).values())
    for k in sorted({2**i for i in range(1, fewest.bit_length())} | {fewest} - {1}):
        probabilities = [pass_at_k(samples, right, k) for samples, right in right_of if samples >= k]
        if probabilities:
            yield f"pass@{k}", fmean(probabilities)


def _majority_at(graded: Sequence[GradedCompletion]) -> Iterator[tuple[str, float]]:
    """Yield maj@k, if each completion is right or wrong and the reward returns final answers.

    k is the largest number of completions of a prompt. A prompt's most frequent final answer counts; among several
    equally frequent ones, the expectation is taken.
    """
    voting = [c for c in graded if c.final is not None]
    groups: dict[int, list[GradedCompletion]] = defaultdict(list)
    for completion in voting:
        groups[completion.prompt].append(completion)
    k = max(map(len, groups.values()), default=0)
    if k > 1 and all(c.accuracy in (0.0, 1.0) for c in voting):
        votes = [([c.final or None for c in group], [c.accuracy == 1.0 for c in group]) for group in groups.values()]
        yield f"maj@{k}", fmean(majority(finals, right) for finals, right in votes)


def _by_source(completions: Sequence[GradedCompletion]) -> Iterator[tuple[str, float]]:
    """Yield the accuracy of each source, if there are several but not too many."""
    sources = sorted({c.source for c in completions})
    if 1 < len(sources) <= MAX_SOURCES:
        for source in sources:
            accuracies = by_prompt([c for c in completions if c.source == source])
            if accuracies:
                yield f"accuracy/{source or 'other'}", fmean(accuracies.values())


def _means(values: Iterable[tuple[int, float | None]]) -> Accuracies:
    """Return the mean value of each prompt that has any."""
    return {prompt: fmean(of_prompt) for prompt, of_prompt in _grouped(values).items()}


def _grouped(values: Iterable[tuple[int, float | None]]) -> dict[int, list[float]]:
    """Return the values of each prompt, without None."""
    grouped: dict[int, list[float]] = defaultdict(list)
    for prompt, value in values:
        if value is not None:
            grouped[prompt].append(value)
    return grouped


def metric_rows(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the names and texts of validation's metrics, with intervals or standard errors, and without p-values."""
    rows = []
    for name, value in metrics.items():
        if not re.fullmatch(r"(sampled_)?(accuracy|reward)_(low|high|p_\w+)", name) and not name.endswith("_stderr"):
            low, high, error = (metrics.get(f"{name}_{end}") for end in ("low", "high", "stderr"))
            bounds = "" if low is None else f" ({low:.2f}-{high:.2f})"
            rows.append((name, f"{value:.3f}{bounds}" if error is None else f"{value:.3f} ± {error:.3f}"))
    return rows

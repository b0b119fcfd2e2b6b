"""Detects steps without a learning signal, explains them, and decides when they end the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite

from rlkit.base.errors import RecipeError, TrainingError, shorten
from rlkit.base.text import counted, part_name
from rlkit.interfaces.loss import Inputs
from rlkit.recipe import Recipe
from rlkit.records.rewards import RewardHistory, advice_on_prompts
from rlkit.records.verdict import merit
from rlkit.run.alarms import Alarms
from rlkit.run.preflight.reward_checks import RewardChecks

MAX_STALLED = 3
"""Consecutive steps without a usable gradient that end the run."""

WITHOUT_SIGNAL_WARNING = 5
"""Consecutive steps whose groups all have equal rewards before a warning."""

MAX_ERRORS_SHOWN = 5
"""Different errors of conversations and rewards that are shown in a run; all errors are counted."""


@dataclass
class Progress:
    """Counts consecutive steps without a learning signal.

    A step is *stalled* if it makes no optimizer step because rewards or conversations failed or numbers are not finite.
    It is *without signal* if all advantages are 0, the filter dropped every group, the reward has no opinion on any
    sample, or a loss of pairs had no pair, for example because all samples of a prompt are right. That is not a
    failure; a run may continue like that for long.

    Args:
        recipe: The run's recipe.
        rewards: The rewards of all steps.
        stalled: Consecutive stalled steps so far.
        without_signal: Consecutive steps without signal so far.
        causes: The cause of each consecutive stalled step.
        errors_shown: Errors of conversations and rewards that were shown.
        waited: The best value of `validation.watch`, and the number of validations since.
        reward: Detects signs that the policy exploits the reward.
        diagnosed: Whether it was said that there is nothing to learn from.
        alarms: Detects metrics that look wrong.
    """

    recipe: Recipe
    rewards: RewardHistory = field(default_factory=RewardHistory)
    stalled: int = 0
    without_signal: int = 0
    causes: list[str] = field(default_factory=list)
    errors_shown: set[str] = field(default_factory=set)
    waited: tuple[float, int] | None = None
    reward: RewardChecks = field(default_factory=RewardChecks)
    diagnosed: bool = False
    alarms: Alarms = field(init=False)

    def __post_init__(self) -> None:
        self.alarms = Alarms(self.recipe)

    def validated(self, metrics: Mapping[str, float]) -> None:
        """Count a validation.

        One without the metric `validation.watch` counts for nothing: all that it is made of may have failed.

        Raises:
            RecipeError: No validation has had the metric, and this one has scores.
        """
        self.reward.validated(metrics)
        section = self.recipe.validation
        if section is None or section.patience is None:
            return
        value = metrics.get(section.watch)
        if value is None:
            scores = {"accuracy", "reward"} if self.recipe.samples_validation else {"accuracy", "loss"}
            if self.waited is None and not scores.isdisjoint(metrics):
                listed = ", ".join(sorted(metrics))
                raise RecipeError(f"validation.watch is {section.watch!r}, expected a metric of validation: {listed}")
            return
        best, since = self.waited or (value, -1)
        is_better = isfinite(value) and not merit(section.watch, value) <= merit(section.watch, best)
        self.waited = (value, 0) if is_better else (best, since + 1)

    def exhausted(self) -> str | None:
        """Return the reason why training ends, if `validation.patience` is used up."""
        section = self.recipe.validation
        if section is None or section.patience is None or self.waited is None or self.waited[1] < section.patience:
            return None
        best, since = self.waited
        change = "higher" if merit(section.watch, 1) > 0 else "lower"
        return f"{since} validations in a row had no {change} {section.watch} than {best:.3f}"

    def see(self, number: int, metrics: Mapping[str, float], errors: Counter[str]) -> Iterator[str]:
        """Count a step; yield warnings.

        Args:
            number: The step's number.
            metrics: The step's metrics, over all ranks.
            errors: Texts of failed rewards and conversations on all ranks; needed only if `failed(metrics)`.

        Raises:
            TrainingError: Too many steps in a row had no learning signal.
        """
        self.rewards.see(metrics)
        diagnosis = self.diagnosis()
        if diagnosis is not None and not self.diagnosed:
            self.diagnosed = True
            self.alarms.warned.add("equal")  # which says less of the same
            yield f"warning: {diagnosis}"
        yield from self.reward.see(metrics)
        yield from self.alarms.see(metrics)
        if self.quiet(number, metrics):
            self.without_signal += 1
            yield from self._warn(number, metrics)
        elif not self.stalls(number, metrics):
            self.without_signal = 0
        if not self.stalls(number, metrics):
            self.stalled = 0
            self.causes = []
            yield from self._show_errors(number, errors)
            return
        self.stalled += 1
        self.causes.append(self._cause(metrics, errors))
        yield f"warning: step {number} taught nothing: {self.causes[-1]}"
        if self.stalled >= MAX_STALLED:
            raise self.failure(number)

    def diagnosis(self, *, is_over: bool = False) -> str | None:
        """Explain why the run has nothing to learn from; with a teacher, rewards do not decide that."""
        return None if self.recipe.teacher is not None else self.rewards.problem(is_over=is_over)

    def failed(self, metrics: Mapping[str, float]) -> bool:
        """Check whether some conversation or reward failed."""
        return metrics.get("rollout/failed", 0.0) + metrics.get("reward/failed", 0.0) > 0

    def stalls(self, number: int, metrics: Mapping[str, float]) -> bool:
        """Check whether a step made no optimizer step, for another reason than equal rewards."""
        critic = self.recipe.critic
        critic_only = critic is not None and number <= critic.policy_delay_steps
        updated = metrics.get("critic/steps") if critic_only else self._updated(metrics)
        return not updated and not self.quiet(number, metrics)

    def quiet(self, number: int, metrics: Mapping[str, float]) -> bool:
        """Check whether all samples of each group have equal rewards, or the reward has no opinion on any."""
        if self._updated(metrics):
            return metrics.get("advantage/abs_mean") == 0
        if metrics.get("update/not_finite"):
            return False
        no_pair = Inputs.GROUPS in self.recipe.loss.inputs and metrics.get("groups/no_signal") == 1
        no_opinion = metrics.get("reward/no_opinion", 0.0) > 0
        return metrics.get("filter/dropped", 0.0) > 0 or ((no_pair or no_opinion) and not self.failed(metrics))

    def _updated(self, metrics: Mapping[str, float]) -> bool:
        """Check whether some optimizer step was made on the step's own samples, not only on mixtures."""
        train = self.recipe.train
        mixtures_only = metrics.get("update/empty", 0.0) >= train.epochs * train.minibatches
        return bool(metrics.get("update/steps")) and not mixtures_only

    def failure(self, number: int) -> TrainingError:
        """Return the error that ends the run."""
        [(cause, times)] = Counter(self.causes).most_common(1)
        count = "" if times == 1 else f" ({times} times)"
        return TrainingError(f"{self.stalled} steps in a row, up to step {number}, taught nothing: {cause}{count}")

    def _warn(self, number: int, metrics: Mapping[str, float]) -> Iterator[str]:
        advice = advice_on_prompts(metrics.get("accuracy", metrics.get("reward/mean")))
        remedy = f"{advice}or raise" if advice else "raise"
        remedy = self.recipe.method.equal_rewards.format(
            remedy=f"{remedy} rollout.group_size or the sampling temperature"
        )
        problem = (
            f"{self.without_signal} steps in a row, up to step {number}, had no group with unequal rewards, so there "
            f"was nothing to learn: {remedy}"
        )
        if self.without_signal == WITHOUT_SIGNAL_WARNING and self.diagnosis() is None:
            yield f"warning: {problem}"
        limit = self.recipe.train.max_steps_without_signal
        if limit is not None and self.without_signal >= limit:
            raise TrainingError(f"{problem} (train.max_steps_without_signal is {limit})")

    def _show_errors(self, number: int, errors: Counter[str]) -> Iterator[str]:
        """Yield each error that cost single conversations or groups, once."""
        for text, times in errors.most_common():
            if text not in self.errors_shown and len(self.errors_shown) < MAX_ERRORS_SHOWN:
                self.errors_shown.add(text)
                yield f"warning: step {number} left out what failed; {counted(times, 'time')}: {shorten(text, 500)}"

    def _cause(self, metrics: Mapping[str, float], errors: Counter[str]) -> str:
        """Return the reason why a step had no learning signal, and what to do."""
        samples = f"{metrics.get('rollout/samples', 0):.0f}"
        top_error = "".join(f"; {counted(n, 'time')}: {shorten(text, 500)}" for text, n in errors.most_common(1))
        not_finite = metrics.get("advantage/not_finite")
        if not_finite:
            return (
                f"advantage {part_name(self.recipe.advantage)} returned {not_finite:.0f} NaN or infinite values; "
                "fix it, or choose another one"
            )
        if metrics.get("update/not_finite"):
            return (
                "no gradient was finite; the batches are in not-finite-*.safetensors of the run folder: lower "
                "train.lr or train.max_grad_norm"
            )
        failed_rewards = metrics.get("reward/failed")
        if failed_rewards:
            return (
                f"reward {part_name(self.recipe.reward)} failed on {failed_rewards:.0f} of {samples} samples"
                f"{top_error}; fix it, or what it calls"
            )
        failed_rollouts = metrics.get("rollout/failed")
        if failed_rollouts:
            return f"{failed_rollouts:.0f} of {samples} conversations failed{top_error}"
        if samples == "0":
            return "none of its prompts fits the model's context; choose shorter prompts or a longer context"
        return "no sample was left to train on"

"""Whether steps teach the policy anything; what is wrong where they do not, and when that ends the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rlkit.errors import RecipeError, TrainingError, shorten
from rlkit.interfaces.loss import Inputs
from rlkit.recipe import Recipe
from rlkit.run.measure.alarms import Alarms
from rlkit.run.measure.reward_checks import RewardChecks
from rlkit.text import part_name

STALLED = 3
"""Consecutive steps without a usable gradient that end the run."""

WITHOUT_SIGNAL = 5
"""Consecutive steps whose groups all have equal rewards before a warning."""

NAMED = 5
"""So many different errors of conversations and rewards are shown in a run; all are counted."""


@dataclass
class Progress:
    """Counts consecutive steps without a learning signal.

    A step is *stalled* if it makes no optimizer step, since rewards or conversations failed or numbers are not finite.
    It is *without signal* if all advantages are 0, the filter dropped every group or a loss of pairs found none, as
    where all samples of a prompt are right: that is no failure, and a run may go on for long like that.

    Args:
        recipe: Has the parts' names, and `train.max_steps_without_signal`.
        stalled: Consecutive steps until now.
        without_signal: Consecutive steps without signal so far.
        causes: Why each of the consecutive stalled steps stalled.
        named: Errors of conversations and rewards that were shown.
        waited: The best value of `validation.watch`, and the validations since.
        reward: Looks for signs that the policy exploits the reward.
        alarms: Looks for metrics that are wrong.
    """

    recipe: Recipe
    stalled: int = 0
    without_signal: int = 0
    causes: list[str] = field(default_factory=list)
    named: set[str] = field(default_factory=set)
    waited: tuple[float, int] | None = None
    reward: RewardChecks = field(default_factory=RewardChecks)
    alarms: Alarms = field(init=False)

    def __post_init__(self) -> None:
        self.alarms = Alarms(self.recipe)

    def validated(self, metrics: Mapping[str, float]) -> None:
        """Count a validation.

        Raises:
            RecipeError: It has no such metric.
        """
        self.reward.validated(metrics)
        section = self.recipe.validation
        if section is None or section.patience is None:
            return
        value = metrics.get(section.watch)
        if value is None:
            listed = ", ".join(sorted(metrics))
            raise RecipeError(f"validation.watch is {section.watch!r}, expected a metric of validation: {listed}")
        best, since = self.waited or (value, -1)
        self.waited = (value, 0) if value > best else (best, since + 1)

    def exhausted(self) -> str | None:
        """Return why training ends, if `validation.patience` is used up."""
        section = self.recipe.validation
        if section is None or section.patience is None or self.waited is None or self.waited[1] < section.patience:
            return None
        best, since = self.waited
        return f"{since} validations in a row had no higher {section.watch} than {best:.3f}"

    def see(self, number: int, metrics: Mapping[str, float], errors: Counter[str]) -> Iterator[str]:
        """Count a step; yield warnings.

        Args:
            number: Of the step.
            metrics: Over all ranks.
            errors: Texts of failed rewards and conversations on all ranks; needed only if `failed(metrics)`.

        Raises:
            TrainingError: Too many steps in a row have taught nothing.
        """
        yield from self.reward.see(metrics)
        yield from self.alarms.see(metrics)
        if self.quiet(number, metrics):
            self.without_signal += 1
            yield from self._warn(number)
        elif not self.stalls(number, metrics):
            self.without_signal = 0
        if not self.stalls(number, metrics):
            self.stalled, self.causes = 0, []
            yield from self._name(number, errors)
            return
        self.stalled += 1
        self.causes.append(self._cause(metrics, errors))
        yield f"warning: step {number} taught nothing: {self.causes[-1]}"
        if self.stalled >= STALLED:
            raise self.failure(number)

    def failed(self, metrics: Mapping[str, float]) -> bool:
        """Whether some conversation or reward failed."""
        return metrics.get("rollout/failed", 0.0) + metrics.get("reward/failed", 0.0) > 0

    def stalls(self, number: int, metrics: Mapping[str, float]) -> bool:
        """Whether a step made no optimizer step where it should, for another reason than equal rewards."""
        critic = self.recipe.critic
        waits = critic is not None and number <= critic.policy_delay_steps
        made = metrics.get("critic/steps") if waits else self._learned(metrics)
        return not made and not self.quiet(number, metrics)

    def quiet(self, number: int, metrics: Mapping[str, float]) -> bool:
        """Whether all samples of each group have equal rewards."""
        if self._learned(metrics):
            return metrics.get("advantage/abs_mean") == 0
        if metrics.get("update/not_finite"):
            return False
        no_pair = Inputs.GROUPS in self.recipe.loss.inputs and metrics.get("groups/no_signal") == 1
        return metrics.get("filter/dropped", 0.0) > 0 or (no_pair and not self.failed(metrics))

    def _learned(self, metrics: Mapping[str, float]) -> bool:
        """Whether some optimizer step learned from the step's own samples, and not from mixtures alone."""
        train = self.recipe.train
        alone = metrics.get("update/empty", 0.0) >= train.epochs * train.minibatches
        return bool(metrics.get("update/steps")) and not alone

    def failure(self, number: int) -> TrainingError:
        """Return the error that ends the run."""
        [(cause, times)] = Counter(self.causes).most_common(1)
        often = "" if times == 1 else f" ({times} times)"
        return TrainingError(f"{self.stalled} steps in a row, up to step {number}, taught nothing: {cause}{often}")

    def _warn(self, number: int) -> Iterator[str]:
        remedy = "choose easier or harder prompts, or raise rollout.group_size or the sampling temperature"
        if self.recipe.rollout.engine.recorded:
            remedy = "leave prompts out of the data whose answers have equal rewards"
        problem = (
            f"{self.without_signal} steps in a row, up to step {number}, had no group with unequal rewards, so there "
            f"was nothing to learn: {remedy}"
        )
        if self.without_signal == WITHOUT_SIGNAL:
            yield f"warning: {problem}"
        limit = self.recipe.train.max_steps_without_signal
        if limit is not None and self.without_signal >= limit:
            raise TrainingError(f"{problem} (train.max_steps_without_signal is {limit})")

    def _name(self, number: int, errors: Counter[str]) -> Iterator[str]:
        """Show errors that cost single conversations or groups, each once."""
        for text, times in errors.most_common():
            if text not in self.named and len(self.named) < NAMED:
                self.named.add(text)
                yield f"warning: step {number} left out what failed; {times} times: {shorten(text, 500)}"

    def _cause(self, metrics: Mapping[str, float], errors: Counter[str]) -> str:
        """Describe why a step had no learning signal, with the remedy."""
        samples = f"{metrics.get('rollout/samples', 0):.0f}"
        most = "".join(f"; {times} times: {shorten(text, 500)}" for text, times in errors.most_common(1))
        if unusable := metrics.get("advantage/not_finite"):
            return (
                f"advantage {part_name(self.recipe.advantage)} returned {unusable:.0f} NaN or infinite values; "
                "fix it, or choose another one"
            )
        if metrics.get("update/not_finite"):
            return (
                "no gradient was finite; the batches are in not-finite-*.safetensors of the run folder: lower "
                "train.lr or train.max_grad_norm"
            )
        if failed := metrics.get("reward/failed"):
            return (
                f"reward {part_name(self.recipe.reward)} failed on {failed:.0f} of {samples} samples{most}; fix it, "
                "or what it calls"
            )
        if failed := metrics.get("rollout/failed"):
            return f"{failed:.0f} of {samples} conversations failed{most}"
        if samples == "0":
            return "none of its prompts fits the model's context; choose shorter prompts or a longer context"
        return "no sample was left to learn from"

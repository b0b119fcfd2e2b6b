"""Validation: held-out prompts completed greedily and by sampling, or scored by a reward model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlkit.errors import RecipeError
from rlkit.ops.statistics import paired_p_value, sign_test
from rlkit.recipe import Recipe
from rlkit.rollout.collect import collect
from rlkit.rollout.service import RolloutService
from rlkit.sections import Validation
from rlkit.train.sampling import score_group
from rlkit.train.validation.metrics import Accuracies, GradedCompletion, by_prompt, metrics, order_metrics
from rlkit.train.validation.reward_model import score_recorded
from rlkit.types import Prompt, Sampling, Trajectory

STEP = 0
"""The step whose random numbers validations draw, so that all of them compare on the same ones."""


@dataclass
class Evaluation:
    """The outcome of a validation.

    Args:
        answers: This rank's trajectories: greedy ones under "", sampled ones under `sampled_`.
        metrics: Metrics over all ranks; those of sampled completions begin with `sampled_`.
        accuracies: Accuracies over all ranks, under the keys of `answers`, which other validations are compared with.
        components: Names of the components of all scores.
    """

    answers: dict[str, list[Trajectory]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    accuracies: dict[str, Accuracies] = field(default_factory=dict)
    components: set[str] = field(default_factory=set)

    @property
    def trajectories(self) -> list[Trajectory]:
        """This rank's trajectories, the greedy ones first."""
        return [trajectory for trajectories in self.answers.values() for trajectory in trajectories]

    def add(self, prefix: str, trajectories: list[Trajectory], completions: Sequence[GradedCompletion]) -> None:
        """Add completions of one kind: this rank's trajectories, and the completions of all ranks."""
        self.answers[prefix] = trajectories
        self.components |= {name for completion in completions for name in completion.components}
        self.metrics |= {f"{prefix}{name}": value for name, value in metrics(completions)}
        self.accuracies[prefix] = by_prompt(completions)

    def compare(self, name: str, reference: Mapping[str, Accuracies]) -> None:
        """Add the p-value of the difference to another validation's accuracies, as `accuracy_p_<name>`."""
        for prefix, own in self.accuracies.items():
            shared = sorted(own.keys() & reference.get(prefix, {}).keys())
            if shared:
                p_value = _p_value([own[i] - reference[prefix][i] for i in shared])
                self.metrics[f"{prefix}accuracy_p_{name}"] = p_value


def evaluate(service: RolloutService, prompts: Sequence[Prompt]) -> Evaluation:
    """Complete the validation prompts and score the completions; a reward model scores recorded ones.

    Failed rollouts and rewards are counted and left out of the means. All ranks must call this.
    """
    if not service.recipe.generates:
        return _evaluate_reward_model(service, prompts)
    section = service.recipe.validation or Validation()
    greedy, sampled = samplings(service.recipe)
    evaluation = Evaluation()
    with service.engine_on_device():
        evaluation.add("", *_complete(service, prompts, greedy, 1))
        if section.samples:
            evaluation.add("sampled_", *_complete(service, prompts, sampled, section.samples))
    return evaluation


def samplings(recipe: Recipe) -> tuple[Sampling, Sampling]:
    """Return the options of validation's greedy and sampled completions."""
    sampled = (recipe.validation or Validation()).sampling or recipe.rollout.sampling
    return replace(sampled, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0), sampled


def _complete(
    service: RolloutService, prompts: Sequence[Prompt], sampling: Sampling, samples: int
) -> tuple[list[Trajectory], list[GradedCompletion]]:
    """Return the trajectories of this rank and the completions of all ranks."""
    own_prompts = service.shard_for_rank(list(enumerate(prompts)))
    setup = service.conversation_setup(sampling, samples, STEP)
    trajectories = service.sample(collect(setup, own_prompts, lambda group: score_group(service, group)))
    completions = _gather(service, [GradedCompletion.of(t) for t in trajectories])
    # the ranks of a tensor-parallel group may differ, since the first one samples for all
    return trajectories, service.ranks.broadcast_tp(completions)


def _evaluate_reward_model(service: RolloutService, prompts: Sequence[Prompt]) -> Evaluation:
    """Score recorded completions with a reward model.

    Raises:
        RecipeError: No prompt has recorded completions with unequal rewards.
    """
    trajectories, own_comparisons = score_recorded(service, prompts)
    comparisons = _gather(service, own_comparisons)
    if not comparisons:
        raise RecipeError(
            "a reward model is validated on prompts with recorded answers of unequal rewards, but no held-out prompt "
            "has them; add some, or set validation: null"
        )
    return Evaluation({"": trajectories}, dict(order_metrics(comparisons)), {"": by_prompt(comparisons)}, {"recorded"})


def _gather(service: RolloutService, completions: list[GradedCompletion]) -> list[GradedCompletion]:
    """Return the completions of all ranks, in the order of their prompts."""
    by_rank = service.ranks.gather_dp(completions)
    return sorted((completion for of_rank in by_rank for completion in of_rank), key=lambda c: c.prompt)


def _p_value(differences: Sequence[float]) -> float:
    """Return the p-value of paired differences."""
    if set(differences) <= {-1.0, 0.0, 1.0}:
        return sign_test(differences.count(1.0), differences.count(-1.0))
    return paired_p_value(differences)

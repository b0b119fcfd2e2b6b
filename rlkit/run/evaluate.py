"""Validation: held-out prompts completed greedily and by sampling, or scored by a reward model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlkit.base.errors import RecipeError
from rlkit.interfaces.callback import ValidationEnd
from rlkit.interfaces.loss import Inputs
from rlkit.models.activations import token_limit
from rlkit.ops.groups import pairs
from rlkit.ops.masked import last_of
from rlkit.ops.statistics import paired_p_value, sign_test
from rlkit.recipe import Recipe, Validation
from rlkit.records.validation_metrics import (
    Accuracies,
    GradedCompletion,
    by_prompt,
    metrics,
    order_metrics,
    rewards_by_prompt,
)
from rlkit.rollout.collate import collate
from rlkit.rollout.collect import collect
from rlkit.rollout.recorded import check_recorded, recorded_group
from rlkit.rollout.service import RolloutService
from rlkit.run.answers import write_answers
from rlkit.train.microbatch import forward_in_micro_batches
from rlkit.train.sampling import score_group
from rlkit.types import Prompt, RolloutBatch, Sampling, Score, Trajectory

if TYPE_CHECKING:
    from pathlib import Path

    from rlkit.records.verdict import Metrics
    from rlkit.run.method import Procedure
    from rlkit.run.metrics_log import MetricsLog
    from rlkit.run.progress import Progress
    from rlkit.run.record import RunRecord
    from rlkit.train.setup import TrainContext


def score_recorded(
    service: RolloutService, prompts: Sequence[Prompt]
) -> tuple[list[Trajectory], list[GradedCompletion]]:
    """Score recorded completions and compare the order of the scores with that of their rewards.

    With a loss that reads rewards of turns, the score at the end of each turn is compared with the turn's reward.

    Returns:
        The trajectories of this rank, with the scores as rewards.
        The comparisons of this rank: one for each group, or each conversation if turns are compared.
    """
    ranks, dialogue = service.ranks, service.dialogue
    own_prompts = list(enumerate(prompts))[ranks.index :: ranks.count]
    by_turn = Inputs.TURN_REWARDS in service.recipe.loss.inputs
    if by_turn:
        check_recorded(prompts, service.recipe.loss)
    groups = [recorded_group(dialogue.template, prompt, group, dialogue.context) for group, prompt in own_prompts]
    trajectories = [trajectory for group in groups for trajectory in group if trajectory.error is None]
    scores = _scores(service, trajectories)
    if by_turn:
        return trajectories, compare_turns(trajectories, scores)
    return trajectories, compare_order(trajectories, last_of(scores, collate(trajectories).mask))


def _scores(service: RolloutService, trajectories: Sequence[Trajectory]) -> Tensor:
    """Return the score [B,T] f32 of each conversation up to each token, on the CPU; all ranks must call this."""
    recipe, ranks, actor = service.recipe, service.ranks, service.actor

    def forward(tokens: Tensor, mask: Tensor, part: RolloutBatch) -> Sequence[Tensor]:
        with ranks.fabric.autocast():
            return (actor(tokens, mask, media=part.media).scores,)

    batch = collate(trajectories).to(ranks.fabric.device)
    limit, packed = token_limit(recipe), actor.passes.packs(batch.media)
    [scores] = forward_in_micro_batches(forward, batch, limit, ranks.all_reduce_max, packed=packed)
    return scores.cpu()


def compare_order(trajectories: Sequence[Trajectory], scores: Tensor) -> list[GradedCompletion]:
    """Replace rewards by scores [B]; return a comparison for each group with unequal rewards.

    Its accuracy is the share of its pairs in the right order, where equal scores count half. Its component `margin` is
    the mean difference of their scores.
    """
    rewards = torch.tensor([trajectory.reward or 0.0 for trajectory in trajectories])
    group = torch.tensor([trajectory.group for trajectory in trajectories], dtype=torch.long)
    pair_rows = pairs(rewards, group)
    pair_groups = group[pair_rows.better]
    margins = scores[pair_rows.better] - scores[pair_rows.worse]
    by_pair = torch.stack((margins, (margins.sign() + 1) / 2), -1)
    comparisons: dict[int, GradedCompletion] = {}
    usable_groups = set(pair_groups.tolist())
    for i, trajectory in enumerate(trajectories):
        if trajectory.group in usable_groups:
            margin, accuracy = by_pair[pair_groups == trajectory.group].mean(0).tolist()
            trajectory.score = Score(float(scores[i]), {"accuracy": accuracy, "recorded": float(rewards[i])})
            comparisons[trajectory.group] = GradedCompletion.of(trajectory)._replace(components={"margin": margin})
    return list(comparisons.values())


def compare_turns(trajectories: Sequence[Trajectory], scores: Tensor) -> list[GradedCompletion]:
    """Replace rewards of turns by the scores [B,T] at their last tokens; return a comparison for each conversation.

    A score is right above 0 if the turn's recorded reward is 0.5 or more, and below 0 otherwise. The accuracy is the
    share of right turns, where scores of 0 count half. The component `margin` is the mean score, with the sign changed
    for turns of a lower reward.
    """
    comparisons = []
    for trajectory, row in zip(trajectories, scores, strict=True):
        recorded = (trajectory.score and trajectory.score.turn_rewards) or []
        turn_scores = [float(row[turn.end - 1]) for turn in trajectory.turns if turn.role == "assistant"]
        signed = [s if reward >= 0.5 else -s for s, reward in zip(turn_scores, recorded, strict=True)]
        margins = torch.tensor(signed)
        accuracy = float((margins.sign() + 1).mean() / 2)
        trajectory.score = Score(0.0, {"accuracy": accuracy}, turn_scores)
        comparisons.append(GradedCompletion.of(trajectory)._replace(components={"margin": float(margins.mean())}))
    return comparisons


STEP = 0
"""The step whose random numbers validations draw, so that all of them compare on the same ones."""


@dataclass
class Evaluation:
    """The outcome of a validation.

    Args:
        answers: This rank's trajectories: greedy ones under "", sampled ones under `sampled_`.
        metrics: Metrics over all ranks; those of sampled completions begin with `sampled_`.
        accuracies: Means by prompt over all ranks, which other validations are compared with: accuracies under the keys
            of `answers`; rewards under `reward` and `sampled_reward` if the reward gives no accuracy.
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

    def write(self, stem: Path) -> None:
        """Write this rank's completions to `<stem>.jsonl.gz` and `<stem>.parquet`; see `rlkit.run.answers`.

        Raises:
            OSError: The files cannot be written.
        """
        write_answers(stem, self)

    def add(self, prefix: str, trajectories: list[Trajectory], completions: Sequence[GradedCompletion]) -> None:
        """Add completions of one kind: this rank's trajectories, and the completions of all ranks."""
        self.answers[prefix] = trajectories
        self.components |= {name for completion in completions for name in completion.components}
        self.metrics |= {f"{prefix}{name}": value for name, value in metrics(completions)}
        self.accuracies[prefix] = by_prompt(completions)
        if not self.accuracies[prefix]:
            self.accuracies[f"{prefix}reward"] = rewards_by_prompt(completions)

    def compare(self, name: str, reference: Mapping[str, Accuracies]) -> None:
        """Add the p-value of the difference to another validation's accuracies, as `accuracy_p_<name>`, or rewards."""
        for key, own in self.accuracies.items():
            shared = sorted(own.keys() & reference.get(key, {}).keys())
            if shared:
                metric = key if key.endswith("reward") else f"{key}accuracy"
                self.metrics[f"{metric}_p_{name}"] = _p_value([own[i] - reference[key][i] for i in shared])


def evaluate_completions(service: RolloutService, prompts: Sequence[Prompt]) -> Evaluation:
    """Complete the validation prompts and score the completions.

    Failed rollouts and rewards are counted and left out of the means. Without a reward there is nothing to score. All
    ranks must call this.
    """
    if not service.recipe.samples_validation:
        return Evaluation()
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
    return sampled.most_likely(), sampled


def _complete(
    service: RolloutService, prompts: Sequence[Prompt], sampling: Sampling, samples: int
) -> tuple[list[Trajectory], list[GradedCompletion]]:
    """Return the trajectories of this rank and the completions of all ranks."""
    own_prompts = service.shard_for_rank(list(enumerate(prompts)))
    setup = service.conversation_setup(sampling, samples, STEP)
    trajectories = service.sample(collect(setup, own_prompts, lambda group: score_group(service, group)))
    completions = _gather(service, [GradedCompletion.of(t) for t in trajectories])
    # the ranks with the same rows may differ, since the first one samples for all
    return trajectories, service.ranks.broadcast_tp(completions)


def evaluate_reward_model(service: RolloutService, prompts: Sequence[Prompt]) -> Evaluation:
    """Score recorded completions with a reward model; all ranks must call this.

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


def evaluate(context: TrainContext, procedure: Procedure) -> Evaluation:
    """Validate on held-out prompts, and measure the loss of their recorded completions; all ranks must call this."""
    data, service = context.data, context.service
    evaluation = procedure.evaluate(service, data.validation)
    if procedure.losses is not None:
        evaluation.metrics = procedure.losses(data, context.models, service, data.validation) | evaluation.metrics
    return evaluation


class Validator:
    """Validates the policy on held-out prompts.

    Args:
        record: Shows the metrics; has the number of steps and the run folder.
        log: Passes completions to the loggers; None except on rank 0.
        progress: Counts validations without improvement.
        procedure: Completes the prompts and scores the completions, and measures the loss of recorded ones.
    """

    def __init__(self, record: RunRecord, log: MetricsLog | None, progress: Progress, procedure: Procedure) -> None:
        self.earlier: dict[str, dict[str, Accuracies]] = {}
        """Accuracies of the validations at the `start` and the `last` one, with which the next one is compared."""
        self._record = record
        self._log = log
        self._progress = progress
        self._procedure = procedure
        self.metrics_by_step: dict[int, Metrics] = {}
        """The metrics of the last validation, by the number of steps before it."""

    def validate(self, context: TrainContext, when: str) -> Metrics:
        """Validate, and return the metrics; the completions are written to the run folder."""
        record = self._record
        step = record.outcome.steps
        record.reporter.note(f"validating on {len(context.data.validation)} prompts")
        evaluation = evaluate(context, self._procedure)
        for name, accuracies in self.earlier.items():
            evaluation.compare(name, accuracies)
        self.earlier["last" if self.earlier else "start"] = evaluation.accuracies
        self.metrics_by_step = {step: evaluation.metrics}
        record.reporter.validated(step, evaluation.metrics)
        log = self._log
        if log is not None and evaluation.answers:
            record.attempt("completions for the loggers", lambda: log.answers(step, evaluation))
        self._progress.validated(evaluation.metrics)
        if context.recipe.log.rollouts.every and evaluation.answers:
            name = f"validation-{when}"
            record.attempt(f"rollouts/{name}", lambda: evaluation.write(record.folder.rollouts(name)))
        context.callbacks.emit("on_validation", ValidationEnd(step, evaluation.metrics, evaluation.trajectories))
        return evaluation.metrics

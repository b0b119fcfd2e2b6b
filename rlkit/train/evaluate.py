"""Validation: held-out prompts answered greedily and by sampling, and what the metrics are worth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from rlkit.errors import RecipeError, shorten
from rlkit.interfaces.loss import Inputs
from rlkit.models.activations import token_limit
from rlkit.ops.groups import pairs
from rlkit.ops.masked import last_of
from rlkit.ops.statistics import bootstrap, majority, paired_p_value, pass_at_k, sign_test, wilson
from rlkit.recipe import Recipe
from rlkit.rollout.collate import collate
from rlkit.rollout.collect import collect
from rlkit.rollout.recorded import check_recorded, recorded_group
from rlkit.rollout.service import RolloutService
from rlkit.sections import Validation
from rlkit.text import safe
from rlkit.train.describe import LONGEST_NAME, MAX_SOURCES, source_of
from rlkit.train.microbatch import forward_in_micro_batches
from rlkit.train.sampling import score_group
from rlkit.types import Prompt, Sampling, Score, StopReason, Trajectory

STEP = 0
"""Validation draws its random numbers as a step of its own, so that before and after are compared on the same ones."""

Accuracies = dict[int, float]
"""The accuracy of each prompt, by its place: the mean of its answers."""


class Answer(NamedTuple):
    """What metrics need of an answer; reward and accuracy are None where there is none.

    `components` are those of its score besides the accuracy; `final` is what it answers, empty if that was not found.
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
    def of(cls, trajectory: Trajectory) -> Answer:
        score, reward = trajectory.score, trajectory.reward
        components = {} if score is None or reward is None else {_name(k): x for k, x in score.components.items()}
        return cls(
            trajectory.group,
            source_of(trajectory.prompt),
            trajectory.error is not None,
            trajectory.stop is StopReason.STOP,
            trajectory.response_length,
            reward,
            components.pop("accuracy", None),
            components,
            None if score is None or reward is None else score.answer,
        )


@dataclass
class Evaluation:
    """A validation: this rank's answers, and all ranks' metrics and accuracies, which others are paired with.

    Metrics of sampled answers have `sampled_` before the name; `answers` and `accuracies` have those of greedy answers
    under "" and of sampled ones under `sampled_`. `components` are the names of those of all scores.
    """

    answers: dict[str, list[Trajectory]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    accuracies: dict[str, Accuracies] = field(default_factory=dict)
    components: set[str] = field(default_factory=set)

    @property
    def trajectories(self) -> list[Trajectory]:
        """This rank's answers, the greedy ones first."""
        return [trajectory for some in self.answers.values() for trajectory in some]

    def add(self, prefix: str, trajectories: list[Trajectory], answers: Sequence[Answer]) -> None:
        """Add answers of one kind: this rank's trajectories, and all ranks' answers."""
        self.answers[prefix] = trajectories
        self.components |= {name for answer in answers for name in answer.components}
        self.metrics |= {f"{prefix}{name}": value for name, value in metrics(answers)}
        self.accuracies[prefix] = _by_prompt(answers)

    def compare(self, name: str, other: Mapping[str, Accuracies]) -> None:
        """Add the p-values of accuracies that are equal to those of another validation, as `accuracy_p_<name>`."""
        for prefix, mine in self.accuracies.items():
            both = sorted(mine.keys() & other.get(prefix, {}).keys())
            if both:
                p_value = _p_value([mine[i] - other[prefix][i] for i in both])
                self.metrics[f"{prefix}accuracy_p_{name}"] = p_value


def evaluate(service: RolloutService, prompts: Sequence[Prompt]) -> Evaluation:
    """Answer the validation prompts; a reward model scores the answers that the data set has instead.

    Failed answers and scores are counted and left out of the means.
    """
    if not service.recipe.generates:  # agreed: an option of the recipe
        return _evaluate_scores(service, prompts)
    section = service.recipe.validation or Validation()
    greedy, sampled = samplings(service.recipe)
    found = Evaluation()
    with service.engine_on_device():
        found.add("", *_answer(service, prompts, greedy, 1))
        if section.samples:
            found.add("sampled_", *_answer(service, prompts, sampled, section.samples))
    return found


def _evaluate_scores(service: RolloutService, prompts: Sequence[Prompt]) -> Evaluation:
    """Score the answers that the data set has, and compare the order of the scores with that of their rewards.

    With a loss that reads rewards of turns, compare the score at the end of each with its reward.

    Raises:
        RecipeError: No prompt has recorded answers with unequal rewards, or not each turn has one.
    """
    ranks, dialogue = service.ranks, service.dialogue
    mine = list(enumerate(prompts))[ranks.index :: ranks.count]
    by_turn = Inputs.TURN_REWARDS in service.recipe.loss.inputs
    if by_turn:
        check_recorded(prompts, service.recipe.loss)
    groups = [recorded_group(dialogue.template, prompt, group, dialogue.context) for group, prompt in mine]
    trajectories = [trajectory for group in groups for trajectory in group]
    scores = _scores(service, trajectories)
    if by_turn:
        answers = compare_turns(trajectories, scores)
    else:
        answers = compare_order(trajectories, last_of(scores, collate(trajectories).mask))
    answers = sorted((a for some in ranks.gather_dp(answers) for a in some), key=_place)
    if not answers:
        raise RecipeError(
            "a reward model is validated on prompts with recorded answers of unequal rewards, but no held-out prompt "
            "has them; add some, or set validation: null"
        )
    return Evaluation({"": trajectories}, dict(order_metrics(answers)), {"": _by_prompt(answers)}, {"recorded"})


def _scores(service: RolloutService, trajectories: Sequence[Trajectory]) -> Tensor:
    """Return the score [B,T] f32 of each conversation up to each token, on the CPU; all ranks must call this."""
    recipe, ranks, actor = service.recipe, service.ranks, service.actor

    def forward(tokens: Tensor, mask: Tensor) -> Sequence[Tensor]:
        with ranks.fabric.autocast():
            return (actor(tokens, mask).scores,)

    batch = collate(trajectories).to(ranks.fabric.device)
    limit, packed = token_limit(recipe.train, recipe.model, recipe.fabric), actor.passes.packed
    [scores] = forward_in_micro_batches(forward, batch, limit, ranks.all_reduce_max, packed=packed)
    return scores.cpu()


def compare_order(trajectories: Sequence[Trajectory], scores: Tensor) -> list[Answer]:
    """Replace rewards by scores [B]; return an answer for each group with unequal rewards.

    Its accuracy is the share of its pairs in the right order, in which equal scores count half, and its component
    `margin` is the mean difference of their scores.
    """
    rewards = torch.tensor([trajectory.reward or 0.0 for trajectory in trajectories])
    group = torch.tensor([trajectory.group for trajectory in trajectories], dtype=torch.long)
    of = pairs(rewards, group)
    margins = scores[of.better] - scores[of.worse]
    order = torch.stack((margins, (margins.sign() + 1) / 2), -1)
    found: dict[int, Answer] = {}
    usable = set(group[of.better].tolist())
    for i, trajectory in enumerate(trajectories):
        if trajectory.group in usable:
            margin, right = order[group[of.better] == trajectory.group].mean(0).tolist()
            trajectory.score = Score(float(scores[i]), {"accuracy": right, "recorded": float(rewards[i])})
            found[trajectory.group] = Answer.of(trajectory)._replace(components={"margin": margin})
    return list(found.values())


def compare_turns(trajectories: Sequence[Trajectory], scores: Tensor) -> list[Answer]:
    """Replace rewards of turns by the scores [B,T] at their last tokens; return an answer for each conversation.

    Its accuracy is the share of its turns on their side, in which scores of 0 count half: above 0 where the recorded
    reward is 0.5 or more. Its component `margin` is the mean score, with the sign changed of the other turns.
    """
    answers = []
    for trajectory, row in zip(trajectories, scores, strict=True):
        recorded = (trajectory.score and trajectory.score.turn_rewards) or []
        found = [float(row[turn.end - 1]) for turn in trajectory.turns if turn.role == "assistant"]
        margins = torch.tensor([s if y >= 0.5 else -s for s, y in zip(found, recorded, strict=True)])
        right = float((margins.sign() + 1).mean() / 2)
        trajectory.score = Score(0.0, {"accuracy": right}, found)
        answers.append(Answer.of(trajectory)._replace(components={"margin": float(margins.mean())}))
    return answers


def order_metrics(answers: Sequence[Answer]) -> Iterator[tuple[str, float]]:
    """Yield the name and the value of each metric of a reward model: means over prompts, as those of answers are."""
    accuracies = _by_prompt(answers)
    yield "accuracy", fmean(accuracies.values())
    yield from zip(("accuracy_low", "accuracy_high"), _interval(answers, accuracies), strict=True)
    yield "margin", fmean(answer.components["margin"] for answer in answers)
    yield from _by_source(answers)


def samplings(recipe: Recipe) -> tuple[Sampling, Sampling]:
    """Return how validation answers greedily, and by sampling."""
    sampled = (recipe.validation or Validation()).sampling or recipe.rollout.sampling
    return replace(sampled, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0), sampled


def metrics(answers: Sequence[Answer]) -> Iterator[tuple[str, float]]:
    """Yield the name and the value of each metric.

    `accuracy` and `reward` are means over prompts of the means of their answers. The bounds of `accuracy` are Wilson's
    where each prompt has one answer, right or wrong, or all answers are alike, and those of a bootstrap over prompts
    elsewhere. Answers that were cut off count as wrong in `finished_accuracy`, and those without their form in
    `strict_accuracy`, for which a reward has the component `strict`.
    """
    accuracies = _by_prompt(answers)
    if accuracies:
        yield "accuracy", fmean(accuracies.values())
        yield from zip(("accuracy_low", "accuracy_high"), _interval(answers, accuracies), strict=True)
        cut = [a._replace(accuracy=a.accuracy if a.finished else 0.0) for a in answers if a.accuracy is not None]
        yield "finished_accuracy", fmean(_by_prompt(cut).values())
        if strict := _means((a.prompt, a.components.get("strict")) for a in answers):
            yield "strict_accuracy", fmean(strict.values())
        yield from _pass_at(answers)
        yield from _majority_at(answers)
        yield from _by_source(answers)
    rewards = _means((a.prompt, a.reward) for a in answers)
    if rewards:
        yield "reward", fmean(rewards.values())
    if answers:
        yield "length", fmean(a.length for a in answers)
        yield "stopped", fmean(a.finished for a in answers)
    yield "failed", float(sum(a.failed for a in answers))
    yield "unscored", float(sum(not a.failed and a.reward is None for a in answers))


def _answer(
    service: RolloutService, prompts: Sequence[Prompt], sampling: Sampling, samples: int
) -> tuple[list[Trajectory], list[Answer]]:
    """Return this rank's trajectories and all ranks' answers."""
    mine = service.shard_for_rank(list(enumerate(prompts)))
    sampler = service.sampler(sampling, samples, STEP)
    trajectories = service.sample(collect(sampler, mine, lambda group: score_group(service, group)))
    everyone = service.ranks.gather_dp([Answer.of(t) for t in trajectories])
    # those of a tensor-parallel group may differ, since the first one samples for all
    return trajectories, service.ranks.broadcast_tp(sorted((a for some in everyone for a in some), key=_place))


def _name(given: object) -> str:
    return shorten(safe(str(given)), LONGEST_NAME)


def _place(answer: Answer) -> int:
    return answer.prompt


def _grouped(values: Iterable[tuple[int, float | None]]) -> dict[int, list[float]]:
    """Return the values of each prompt that are there."""
    found: dict[int, list[float]] = defaultdict(list)
    for prompt, value in values:
        if value is not None:
            found[prompt].append(value)
    return found


def _means(values: Iterable[tuple[int, float | None]]) -> Accuracies:
    return {prompt: fmean(some) for prompt, some in _grouped(values).items()}


def _by_prompt(answers: Sequence[Answer]) -> Accuracies:
    return _means((a.prompt, a.accuracy) for a in answers)


def _interval(answers: Sequence[Answer], accuracies: Accuracies) -> tuple[float, float]:
    graded = [a.accuracy for a in answers if a.accuracy is not None]
    by_prompt = list(accuracies.values())
    single = len(graded) == len(by_prompt) and set(graded) <= {0.0, 1.0}
    if single or set(by_prompt) in ({0.0}, {1.0}):  # what a bootstrap draws from equal values has no width
        return wilson(round(sum(by_prompt)), len(by_prompt))
    return bootstrap(by_prompt)


def _pass_at(answers: Sequence[Answer]) -> Iterator[tuple[str, float]]:
    """Yield pass@k for k = 2, 4, 8 … up to the fewest answers of a prompt, and for those, if all are right or wrong."""
    counts = _grouped((a.prompt, a.accuracy) for a in answers)
    if any(x not in (0.0, 1.0) for some in counts.values() for x in some):
        return
    fewest = min(map(len, counts.values()))
    for k in sorted({2**i for i in range(1, fewest.bit_length())} | {fewest} - {1}):
        yield f"pass@{k}", fmean(pass_at_k(len(some), round(sum(some)), k) for some in counts.values())


def _majority_at(answers: Sequence[Answer]) -> Iterator[tuple[str, float]]:
    """Yield maj@k, k being the most answers of a prompt, where all are right or wrong and the reward finds finals.

    The most frequent final answer of a prompt counts. Of several the expectation is taken, all being equally likely.
    """
    voting = [a for a in answers if a.accuracy is not None and a.final is not None]
    groups: dict[int, list[Answer]] = defaultdict(list)
    for answer in voting:
        groups[answer.prompt].append(answer)
    k = max(map(len, groups.values()), default=0)
    if k > 1 and all(a.accuracy in (0.0, 1.0) for a in voting):
        chances = (
            majority([a.final or None for a in some], [a.accuracy == 1.0 for a in some]) for some in groups.values()
        )
        yield f"maj@{k}", fmean(chances)


def _by_source(answers: Sequence[Answer]) -> Iterator[tuple[str, float]]:
    sources = sorted({a.source for a in answers})
    if 1 < len(sources) <= MAX_SOURCES:
        for source in sources:
            mine = _by_prompt([a for a in answers if a.source == source])
            if mine:
                yield f"accuracy/{source or 'other'}", fmean(mine.values())


def _p_value(differences: Sequence[float]) -> float:
    if set(differences) <= {-1.0, 0.0, 1.0}:
        return sign_test(differences.count(1.0), differences.count(-1.0))
    return paired_p_value(differences)

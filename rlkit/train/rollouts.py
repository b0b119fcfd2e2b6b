"""The trajectories of a step: shared among ranks, scored, and reported to the order of prompts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import fmean

import torch

from rlkit.base.tasks import Background
from rlkit.data.data import Data
from rlkit.distributed.ranks import Ranks
from rlkit.interfaces.fields import Field
from rlkit.interfaces.loss import Inputs
from rlkit.ops.batching import assign
from rlkit.rollout.collate import add_rewards
from rlkit.rollout.recorded import recorded_group
from rlkit.rollout.service import RolloutService
from rlkit.train.metrics import Meter, describe_rollouts, describe_texts, has_no_opinion
from rlkit.types import Batch, Prompt, RolloutBatch, Score, Trajectory


@dataclass
class Rollouts:
    """The trajectories of a step on a rank.

    Args:
        all: Every trajectory, with those that failed or were filtered out.
        sampled: Trajectories that this rank sampled and that may be trained on.
        train_on: Trajectories that this rank trains on: `sampled`, unless ranks share the work.
        dispatch: For each rank, the indices in `sampled` of the trajectories that it trains on.
        greedy: Rewards of the greedy completions by group; None if the estimator does not need them.
        greedy_completions: The greedy completions by group.
        scoring: Tasks that score trajectories.
        errors: Counts of error messages on this rank.
    """

    all: list[Trajectory] = field(default_factory=list)
    sampled: list[Trajectory] = field(default_factory=list)
    train_on: list[Trajectory] = field(default_factory=list)
    dispatch: list[list[int]] = field(default_factory=list)
    greedy: dict[int, float] | None = None
    greedy_completions: dict[int, Trajectory] = field(default_factory=dict)
    scoring: Background = field(default_factory=Background)
    errors: Counter[str] = field(default_factory=Counter)


Obtain = Callable[[Data, RolloutService, int, Meter], Rollouts]
"""Returns the rollouts of a step, given its number, and logs their metrics; all ranks call it."""


def recorded(data: Data, service: RolloutService, number: int, meter: Meter) -> Rollouts:
    """Return this rank's recorded completions of a step."""
    return recorded_answers(data, service, data.prompts(number), meter)


def recorded_answers(
    data: Data, service: RolloutService, prompts: Sequence[tuple[int, Prompt]], meter: Meter
) -> Rollouts:
    """Return this rank's recorded completions of prompts, with their numbers; all ranks must call this."""
    rollouts = Rollouts()
    for group, prompt in service.shard_for_rank(prompts):
        rollouts.all += recorded_group(data.dialogue.template, prompt, group, data.dialogue.context)
    rollouts.sampled = [t for t in rollouts.all if t.error is None]
    return share_groups(rollouts, service.ranks, meter)


def share_groups(rollouts: Rollouts, ranks: Ranks, meter: Meter) -> Rollouts:
    """Set what each rank trains on: complete groups of all that was sampled. All ranks must call this."""
    rollouts.dispatch = assign_groups(ranks, rollouts.sampled, meter)
    moved = ranks.exchange([[rollouts.sampled[i] for i in indices] for indices in rollouts.dispatch])
    rollouts.train_on = ranks.broadcast_tp(moved)
    return rollouts


def assign_groups(ranks: Ranks, sampled: Sequence[Trajectory], meter: Meter) -> list[list[int]]:
    """Assign complete groups to ranks by their tokens, all ranks alike; log the imbalance before and after.

    Returns:
        For each rank, the indices in `sampled` of the trajectories that it trains on.
    """
    if ranks.count == 1:
        return [list(range(len(sampled)))]
    tokens_of: dict[int, int] = defaultdict(int)
    for trajectory in sampled:
        tokens_of[trajectory.group] += token_count([trajectory])
    by_rank = ranks.gather_dp(dict(tokens_of))
    groups = sorted((group, tokens) for of_rank in by_rank for group, tokens in of_rank.items())
    assigned = assign([tokens for _, tokens in groups], ranks.count)
    rank_of = {group: rank for (group, _), rank in zip(groups, assigned, strict=True)}
    before = [sum(of_rank.values()) for of_rank in by_rank]
    after = [sum(tokens for group, tokens in groups if rank_of[group] == rank) for rank in range(ranks.count)]
    for name, loads in (("before", before), ("after", after)):
        meter.max(f"imbalance/{name}", max(loads) * ranks.count / max(sum(loads), 1))
    return [[i for i, t in enumerate(sampled) if rank_of[t.group] == rank] for rank in range(ranks.count)]


def await_scores(service: RolloutService, rollouts: Rollouts, meter: Meter) -> list[int]:
    """Wait until the rollouts are scored, log them, and exchange the scores among ranks.

    Returns:
        The indices in `train_on` of the trajectories to train on. A group is left out, and counted, if the reward of
        one of its trajectories or of its greedy completion failed; a trajectory, if the reward has no opinion on it.
    """
    service.wait(rollouts.scoring.wait())
    if rollouts.greedy is not None:
        rewards = {group: trajectory.reward for group, trajectory in rollouts.greedy_completions.items()}
        rollouts.greedy |= {group: reward for group, reward in rewards.items() if reward is not None}
    recipe = service.recipe
    describe_rollouts(rollouts.all, Inputs.REWARDS in recipe.loss.inputs and recipe.reward is not None, meter)
    describe_texts(rollouts.all, recipe.rollout.group_size > 1, meter)
    for name, growth in service.reward_counts.growth().items():
        meter.count(f"reward/{name}", growth)
    rollouts.errors = count_errors(rollouts.all)
    return exchange_scores(service.ranks, rollouts)


def count_errors(trajectories: Sequence[Trajectory]) -> Counter[str]:
    """Count each error of a rollout or a reward."""
    errors = (t.error or (t.score and t.score.error) for t in trajectories)
    return Counter(error for error in errors if error)


def exchange_scores(ranks: Ranks, rollouts: Rollouts) -> list[int]:
    """Send each score to the rank that trains on its trajectory; return the indices in `train_on` that have one.

    All ranks must call this.
    """
    greedy = rollouts.greedy or {}
    usable = {t.group for t in rollouts.sampled} if rollouts.greedy is None else set(rollouts.greedy)
    usable -= {t.group for t in rollouts.all if t.error is None and t.reward is None and not has_no_opinion(t)}
    outgoing = [
        (t.score, greedy.get(t.group)) if t.group in usable and not has_no_opinion(t) else None
        for t in rollouts.sampled
    ]
    incoming: list[tuple[Score | None, float | None] | None] = ranks.broadcast_tp(
        ranks.exchange([[outgoing[i] for i in indices] for indices in rollouts.dispatch])
    )
    sampled = {id(t) for t in rollouts.sampled}
    rollouts.all = [t for t in rollouts.all if id(t) not in sampled] + rollouts.train_on
    for trajectory, scores in zip(rollouts.train_on, incoming, strict=True):
        if scores is not None:
            trajectory.score, greedy_reward = scores
            if rollouts.greedy is not None and greedy_reward is not None:
                rollouts.greedy[trajectory.group] = greedy_reward
    return [i for i, scores in enumerate(incoming) if scores is not None]


def with_branches(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the rows of a batch: each trajectory, followed by the further samples of its rollout."""
    return [sample for trajectory in trajectories for sample in trajectory.samples]


def select_scored(
    rollouts: Rollouts, sampled: RolloutBatch, rows: list[int], declared: Sequence[Field] = ()
) -> tuple[Batch, list[Trajectory]]:
    """Return the rows to train on with their rewards, and their trajectories; branches have the rollout's reward.

    Args:
        rollouts: Those of the step, with their scores.
        sampled: A batch of `with_branches(rollouts.train_on)`.
        rows: Indices in `train_on` of the rollouts to train on.
        declared: The fields that the reward fills; those by row are of all samples of a rollout.
    """
    trajectories = with_branches([rollouts.train_on[i] for i in rows])
    device = sampled.tokens.device
    starts = list(accumulate((len(t.samples) for t in rollouts.train_on), initial=0))
    samples = [row for i in rows for row in range(starts[i], starts[i + 1])]
    for rollout in (rollouts.train_on[i] for i in rows):
        for branch in rollout.span.branches:  # it has its rollout's reward, or in another role that role's alone
            scored = rollout.score.fields if rollout.score else {}
            by_row = {spec.name: scored[spec.name] for spec in declared if spec.by == "row" and spec.name in scored}
            branch.score = Score(0.0, fields=by_row)
            if rollout.reward is not None and branch.span.speaker == rollout.span.speaker:
                components = rollout.score.components if rollout.score else {}
                branch.score = Score(rollout.reward - sum(branch.turn_rewards), components, fields=by_row)
    if len(samples) < len(sampled):
        sampled = sampled.rows(torch.tensor(samples, dtype=torch.long, device=device))
    batch = add_rewards(sampled, trajectories, declared)
    if len(samples) > len(rows):
        main: list[bool] = []
        for i in rows:
            speakers = [sample.span.speaker for sample in rollouts.train_on[i].samples]
            main += [True, *(speaker != before for before, speaker in pairwise(speakers))]
        batch.main = torch.tensor(main, dtype=torch.bool, device=device)
    if any(trajectory.span.role for trajectory in trajectories):
        batch.peers = torch.tensor(_peers([rollouts.train_on[i] for i in rows]), device=device)
    if rollouts.greedy is not None:
        batch.greedy_rewards = torch.tensor([rollouts.greedy[t.group] for t in trajectories], device=device)
        for trajectory in trajectories:
            trajectory.credit["greedy_reward"] = rollouts.greedy[trajectory.group]
    return batch, trajectories


def _peers(rollouts: Sequence[Trajectory]) -> list[int]:
    """Return for each sample of the rollouts the index of the samples that it is compared with: `Batch.peers`."""
    indices: dict[tuple[object, ...], int] = {}
    peers = []
    for number, rollout in enumerate(rollouts):
        spans = [sample.span for sample in rollout.samples]
        conversations = Counter(role for _, role in {(span.speaker, span.role) for span in spans})
        for span in spans:
            within = number if conversations[span.role] > 1 else None
            peers.append(indices.setdefault((rollout.group, span.role, within), len(indices)))
    return peers


def log_recorded(rollouts: Rollouts, meter: Meter) -> None:
    """Log recorded completions; their scores came with them."""
    describe_rollouts(rollouts.all, rewarded=False, meter=meter)
    rollouts.errors = count_errors(rollouts.all)
    rollouts.all = list(rollouts.train_on)


def record_outcome(data: Data, service: RolloutService, rollouts: Rollouts, meter: Meter) -> None:
    """Report to the order of prompts how often each was solved and which were stopped; all ranks must call this.

    The rate of a prompt is the mean accuracy of its completions, or else their mean reward, without those that failed.
    Prompts that replaced filtered ones are not counted.
    """
    order = data.order.by_outcome
    if order is None:
        return
    drawn = data.order.drawn()
    id_of = {slot: data.prompt(data.order.rows[prompt.row]).id for slot, prompt in enumerate(drawn)}
    own_rates: dict[int, list[float]] = {}
    for trajectory in rollouts.all:
        if id_of.get(trajectory.group) == trajectory.prompt.id:
            slot_rates = own_rates.setdefault(trajectory.group, [])
            if trajectory.error is None and trajectory.score is not None and trajectory.reward is not None:
                slot_rates.append(trajectory.score.components.get("accuracy", trajectory.reward))
    all_rates: dict[int, list[float]] = defaultdict(list)
    for rank_rates in service.ranks.gather_dp(own_rates):
        for slot, slot_rates in rank_rates.items():
            all_rates[slot] += slot_rates
    mean_rates = {slot: fmean(slot_rates) if slot_rates else None for slot, slot_rates in all_rates.items()}
    rates = service.ranks.broadcast_tp(mean_rates)
    data.order.record(drawn, rates)
    meter.max("curriculum/epoch", float(order.epoch))
    meter.max("curriculum/waiting", order.waiting())
    meter.max("rollout/postponed", len(drawn) - len(rates))


def token_count(trajectories: Sequence[Trajectory]) -> int:
    """Return the number of tokens of trajectories, and of all samples of agents' rollouts."""
    return sum(len(sample.tokens) for trajectory in trajectories for sample in trajectory.samples)

"""A step's rollouts: sampled, scored and filtered, with a greedy answer to each prompt where the estimator needs it."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from statistics import fmean

from rlkit.concurrency.tasks import Background, run_concurrently
from rlkit.distributed.ranks import Ranks
from rlkit.errors import shorten
from rlkit.interfaces import outputs
from rlkit.interfaces.advantage import Needs
from rlkit.interfaces.filter import GroupFilter
from rlkit.interfaces.loss import Inputs
from rlkit.ops.batching import assign
from rlkit.ops.statistics import Moments, repeated
from rlkit.recipe import Recipe
from rlkit.registry import calling, require
from rlkit.rollout.collect import BusyTimer, Quota, Sampler, collect
from rlkit.rollout.recorded import recorded_group
from rlkit.rollout.service import RolloutService
from rlkit.text import safe
from rlkit.train.data import Data
from rlkit.train.metrics import Meter
from rlkit.types import Prompt, Sampling, Score, StopReason, Trajectory

MAX_SOURCES, LONGEST_NAME = 50, 80
"""Sources whose metrics are shown apart, and the characters of a source's or a component's name that are kept."""

MEASURED_ANSWERS, MEASURED_TOKENS = 64, 2**15
"""Of a step, on a rank, about so much at most is looked through for repetitions: every second trajectory, or so."""


@dataclass
class Rollouts:
    """A step's trajectories: all of them, those that may be trained on, and what is still being scored.

    `sampled` were sampled on this rank, `train_on` is what this rank trains on: the same, unless ranks share the work.
    `greedy` holds the reward of a greedy answer by group, where the estimator needs it, once `greedy_answers` are
    scored; `errors` counts the texts of what failed on this rank.
    """

    all: list[Trajectory] = field(default_factory=list)
    sampled: list[Trajectory] = field(default_factory=list)
    train_on: list[Trajectory] = field(default_factory=list)
    dispatch: list[list[int]] = field(default_factory=list)
    greedy: dict[int, float] | None = None
    greedy_answers: dict[int, Trajectory] = field(default_factory=dict)
    scoring: Background = field(default_factory=Background)
    errors: Counter[str] = field(default_factory=Counter)


def source(recipe: Recipe) -> Callable[[Data, RolloutService, int, Meter], Rollouts]:
    """Return where a step's rollouts come from: the policy, or the data set."""
    return recorded if recipe.rollout.engine.recorded else sample


def sample(data: Data, service: RolloutService, number: int, meter: Meter) -> Rollouts:
    """Sample this rank's prompts; with a filter, score them and replace dropped groups up to `max_refills` times.

    Without a filter, scoring is still running when this returns; `await_scores` waits for it.
    """
    rollouts = Rollouts(greedy={} if Needs.GREEDY in service.recipe.needs else None)
    service.sample(_sample(data, service, number, rollouts, meter))
    return share_groups(rollouts, service.ranks, meter)


def recorded(data: Data, service: RolloutService, number: int, meter: Meter) -> Rollouts:
    """Return this rank's prompts with the answers that the data set has."""
    rollouts = Rollouts()
    for group, prompt in service.shard_for_rank(data.prompts(number)):
        rollouts.all += recorded_group(data.template, prompt, group, data.context)
    rollouts.sampled = list(rollouts.all)
    return share_groups(rollouts, service.ranks, meter)


def share_groups(rollouts: Rollouts, ranks: Ranks, meter: Meter) -> Rollouts:
    """Set what each rank trains on, whole groups of what all have sampled; all ranks must call this."""
    rollouts.dispatch = assign_groups(ranks, rollouts.sampled, meter)
    moved = ranks.exchange([[rollouts.sampled[i] for i in route] for route in rollouts.dispatch])
    rollouts.train_on = ranks.broadcast_tp(moved)
    return rollouts


async def _sample(data: Data, service: RolloutService, number: int, rollouts: Rollouts, meter: Meter) -> None:
    everything = data.prompts(number)
    prompts, chosen = service.shard_for_rank(everything), service.recipe.rollout.filter
    quota: Quota | None = None
    if service.recipe.rollout.oversample > 1:
        first, all_of = sum(one.postponed for one in data.drawn()), service.recipe.train.prompts_per_step
        quota = Quota(len(service.shard_for_rank(everything[:all_of])), len(service.shard_for_rank(everything[:first])))
    async with rollouts.scoring:  # an error cancels it
        for attempt in range(1 + (0 if chosen is None else chosen.max_refills)):
            found = await _play(service, prompts, (number, attempt), rollouts, meter, quota=quota)
            quota = None  # for the prompts that take the places of others
            rollouts.all += found
            if chosen is None:
                rollouts.sampled = [t for t in found if t.error is None]
                break
            await rollouts.scoring.wait()
            dropped = _filter(chosen, found, rollouts, meter)
            if not dropped:
                break
            if attempt < chosen.max_refills:
                prompts = [(group, data.spare(number, attempt, group)) for group in dropped]
                meter.count("filter/refilled", len(prompts))


def assign_groups(ranks: Ranks, sampled: Sequence[Trajectory], meter: Meter) -> list[list[int]]:
    """Assign whole groups to ranks by their tokens, all ranks alike; log how uneven the work was before and is now.

    Returns:
        For each rank the places in `sampled` of the trajectories that it trains on.
    """
    if ranks.count == 1:
        return [list(range(len(sampled)))]
    sizes: dict[int, int] = defaultdict(int)
    for trajectory in sampled:
        sizes[trajectory.group] += len(trajectory.tokens)
    known = ranks.gather_dp(dict(sizes))
    everything = sorted((group, size) for mine in known for group, size in mine.items())
    rank_of = dict(zip((g for g, _ in everything), assign([s for _, s in everything], ranks.count), strict=True))
    before = [sum(mine.values()) for mine in known]
    after = [sum(size for group, size in everything if rank_of[group] == rank) for rank in range(ranks.count)]
    for name, loads in (("before", before), ("after", after)):
        meter.max(f"imbalance/{name}", max(loads) * ranks.count / max(sum(loads), 1))
    return [[i for i, t in enumerate(sampled) if rank_of[t.group] == rank] for rank in range(ranks.count)]


def await_scores(service: RolloutService, rollouts: Rollouts, meter: Meter) -> list[int]:
    """Wait for the scores; return the places in `train_on` of the trajectories to train on.

    Whole groups in which a reward failed, or the greedy answer's did, are left out and counted.
    """
    service.wait(rollouts.scoring.wait())
    if rollouts.greedy is not None:
        known_rewards = {group: answer.reward for group, answer in rollouts.greedy_answers.items()}
        rollouts.greedy |= {group: reward for group, reward in known_rewards.items() if reward is not None}
    recipe = service.recipe
    by_policy = not recipe.rollout.engine.recorded
    describe(rollouts.all, by_policy and Inputs.REWARDS in recipe.loss.inputs and recipe.reward is not None, meter)
    if by_policy:
        describe_texts(rollouts.all, recipe.rollout.group_size > 1, meter)
    rollouts.errors = Counter(error for t in rollouts.all if (error := t.error or (t.score and t.score.error)))
    failed = {t.group for t in rollouts.all if t.error is None and unscored(t)}
    usable = set(rollouts.greedy) if rollouts.greedy is not None else {t.group for t in rollouts.sampled}
    usable -= failed
    greedy = rollouts.greedy or {}
    known = [(t.score, greedy.get(t.group)) if t.group in usable else None for t in rollouts.sampled]
    ranks = service.ranks
    scores = ranks.broadcast_tp(ranks.exchange([[known[i] for i in route] for route in rollouts.dispatch]))
    sampled = {id(t) for t in rollouts.sampled}
    rollouts.all = [t for t in rollouts.all if id(t) not in sampled] + rollouts.train_on
    for trajectory, found in zip(rollouts.train_on, scores, strict=True):
        if found is not None:
            trajectory.score, answer = found
            if rollouts.greedy is not None and answer is not None:
                rollouts.greedy[trajectory.group] = answer
    return [i for i, found in enumerate(scores) if found is not None]


def record_outcome(data: Data, service: RolloutService, rollouts: Rollouts, meter: Meter) -> None:
    """Let the order of prompts know how often each was solved and which were stopped; all ranks must call this.

    Prompts that took the places of others, since a filter dropped these, count for nothing here.
    """
    order = data.order
    if order is None:  # agreed: by the recipe
        return
    drawn = data.drawn()
    names = {slot: data.prompt(data.kept[one.row]).id for slot, one in enumerate(drawn)}
    mine: dict[int, list[float]] = {}
    for trajectory in rollouts.all:
        if names.get(trajectory.group) == trajectory.prompt.id:
            known = mine.setdefault(trajectory.group, [])
            if (rate := success_rate(trajectory)) is not None:
                known.append(rate)
    found: dict[int, list[float]] = defaultdict(list)
    for some in service.ranks.gather_dp(mine):
        for slot, known in some.items():
            found[slot] += known
    rates = service.ranks.broadcast_tp({slot: fmean(known) if known else None for slot, known in found.items()})
    data.record(drawn, rates)
    meter.max("curriculum/epoch", float(order.epoch))
    meter.max("curriculum/waiting", order.waiting())
    meter.max("rollout/postponed", len(drawn) - len(rates))


def success_rate(trajectory: Trajectory) -> float | None:
    """Return the accuracy of an answer, its reward where that has none; None if it failed."""
    if trajectory.error is not None or trajectory.score is None or trajectory.reward is None:
        return None
    return trajectory.score.components.get("accuracy", trajectory.reward)


async def _play(
    service: RolloutService,
    prompts: Sequence[tuple[int, Prompt]],
    when: tuple[int, int],
    rollouts: Rollouts,
    meter: Meter,
    *,
    quota: Quota | None = None,
) -> list[Trajectory]:
    """Sample all prompts at once until the quota is reached, greedy answers beside them; score groups as they end."""
    rollout, (number, attempt) = service.recipe.rollout, when
    timer = BusyTimer()

    def sampler(sampling: Sampling, samples: int) -> Sampler:
        return service.sampler(sampling, samples, number, attempt=attempt, timer=timer)

    async def score_group(group: list[Trajectory]) -> None:
        rollouts.scoring.start(finish(service, group))

    sampled = collect(sampler(rollout.sampling, rollout.group_size), prompts, score_group, quota)
    if rollouts.greedy is None:
        trajectories = await sampled
    else:
        greedy = collect(sampler(most_likely(rollout.sampling), 1), prompts, score_group)
        trajectories, answers = await run_concurrently(sampled, greedy)
        rollouts.greedy_answers |= {answer.group: answer for answer in answers}  # the last of each group counts
    meter.max("time/engine_idle_share", timer.idle_share())
    await asyncio.sleep(0)  # the last groups' scoring starts
    return trajectories


def most_likely(sampling: Sampling) -> Sampling:
    """Return the same with the most likely token each time."""
    return replace(sampling, temperature=0.0)


async def finish(service: RolloutService, group: Sequence[Trajectory]) -> None:
    """Score a group."""
    if group:
        reward = service.recipe.reward
        scores = [Score(0.0) for _ in group] if reward is None else await service.score(reward, group)
        for trajectory, score in zip(group, scores, strict=True):
            trajectory.score = score


def unscored(trajectory: Trajectory) -> bool:
    """Whether a reward is missing."""
    return trajectory.reward is None


def describe(trajectories: Sequence[Trajectory], rewarded: bool, meter: Meter) -> None:
    """Count failures, and take the means of what is whole.

    Args:
        trajectories: All of this rank.
        rewarded: Whether rewards are the policy's: those of recorded answers say nothing of it.
        meter: Takes the metrics.
    """
    missing = [t for t in trajectories if t.error is None and unscored(t)]
    meter.count("rollout/samples", len(trajectories))
    meter.count("rollout/failed", sum(t.error is not None for t in trajectories))
    meter.count("reward/failed", len(missing))
    meter.count("reward/ungradable", sum(t.score is not None and t.score.ungradable for t in trajectories))
    meter.count("reward/groups_dropped", len({t.group for t in missing}))
    lengths = [t.response_length for t in trajectories]
    meter.count("rollout/tokens", sum(lengths))
    meter.means("rollout/length", lengths)
    meter.means("conversation/turns", [len(t.turn_rewards) for t in trajectories])
    meter.means("rollout/stopped", [t.stop is StopReason.STOP for t in trajectories])
    if lengths:
        meter.max("rollout/length_max", max(lengths))
    for trajectory in trajectories:
        for name, count in trajectory.counts.items():
            meter.count(f"conversation/{name}", count)
        if rewarded and trajectory.score is not None and trajectory.reward is not None:
            meter.mean("reward/mean", trajectory.reward)
            for name, value in trajectory.score.components.items():
                meter.mean("accuracy" if name == "accuracy" else f"reward/{name}", value)


def describe_texts(trajectories: Sequence[Trajectory], grouped: bool, meter: Meter) -> None:
    """Measure what a policy does that exploits its reward: answers that are long, are cut off, or repeat themselves.

    Args:
        trajectories: All of this rank; only whole ones are read.
        grouped: Whether a prompt has several samples: length and reward are then compared within each group.
        meter: Takes the metrics.
    """
    scored = [(t, t.reward) for t in trajectories if t.error is None and t.reward is not None]
    finished = [reward for t, reward in scored if t.stop is StopReason.STOP]
    cut = [reward for t, reward in scored if t.stop in (StopReason.LENGTH, StopReason.CONTEXT)]
    meter.means("rollout/reward_finished", finished)
    meter.means("rollout/reward_truncated", cut)
    meter.mean("rollout/truncated", len(cut) / max(len(scored), 1), len(scored))
    groups: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for trajectory, reward in scored:
        groups[trajectory.group].append((trajectory.response_length, reward))
    for group in groups.values():
        pairs = Moments.of(*zip(*group, strict=True))
        meter.correlate("reward/length_correlation", pairs.centered() if grouped else pairs)
    most = max(len(scored) / MEASURED_ANSWERS, sum(len(t.tokens) for t, _ in scored) / MEASURED_TOKENS)
    some = scored[:: max(1, ceil(most))]
    meter.means("rollout/repetition", [x for t, _ in some if (x := _repetition(t)) is not None])


def source_of(prompt: Prompt) -> str:
    """Return where a prompt is from, as metrics name it; empty where that is not known."""
    return shorten(safe(prompt.source_name), LONGEST_NAME)


def log_by_source(log: Callable[[str, float], None], name: str, values: Sequence[tuple[Prompt, float]]) -> None:
    """Log what prompts have, and once more as `name/SOURCE`, unless there are too many sources.

    Args:
        log: Takes a name and a value, as `Meter.mean` and `Meter.count` do.
        name: Of the metric.
        values: Of each prompt.
    """
    few = len({source_of(prompt) for prompt, _ in values}) <= MAX_SOURCES
    for prompt, value in values:
        log(name, value)
        if few and (source := source_of(prompt)):
            log(f"{name}/{source}", value)


def _repetition(trajectory: Trajectory) -> float | None:
    """Return the share of runs of four tokens that occurred before in the same turn; None if there are none."""
    again = runs = 0
    for role, start, end in trajectory.turns:
        if role == "assistant":
            found = repeated(trajectory.tokens[start:end])
            again, runs = again + found[0], runs + found[1]
    return again / runs if runs else None


def _filter(chosen: GroupFilter, found: Sequence[Trajectory], rollouts: Rollouts, meter: Meter) -> list[int]:
    """Keep the scored groups that the filter keeps; return the numbers of those that it drops."""
    groups: dict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in found:
        if trajectory.error is None:
            groups[trajectory.group].append(trajectory)
    scored = {g: members for g, members in groups.items() if not any(map(unscored, members))}
    dropped = [g for g, members in scored.items() if not keeps(chosen, members)]
    log_by_source(meter.mean, "filter/dropped", [(scored[g][0].prompt, float(g in dropped)) for g in scored])
    rollouts.sampled += [t for g, members in scored.items() if g not in dropped for t in members]
    return dropped


def keeps(chosen: GroupFilter, members: Sequence[Trajectory]) -> bool:
    """Whether a filter keeps a group, whose scores all have a reward."""
    with calling(chosen, "keep"):
        kept = chosen.keep(members)
    require(chosen, "keep", outputs.of_filter(kept))
    return kept

"""Sampling a step's prompts: all at once, scored as groups end, filtered and refilled."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from rlkit.base.tasks import run_concurrently
from rlkit.data.data import Data
from rlkit.interfaces import outputs
from rlkit.interfaces.advantage import Needs
from rlkit.interfaces.filter import GroupFilter
from rlkit.registry import calling, require
from rlkit.rollout.collect import BusyTimer, Quota, collect
from rlkit.rollout.service import RolloutService
from rlkit.train.metrics import Meter, has_no_opinion, log_by_source
from rlkit.train.rollouts import Rollouts, share_groups
from rlkit.types import Prompt, Score, Trajectory


def sample(data: Data, service: RolloutService, number: int, meter: Meter) -> Rollouts:
    """Sample this rank's prompts of a step.

    With a filter, the groups are scored here, and dropped ones are replaced up to `max_refills` times. Without one,
    scoring may still be running when this returns; `await_scores` waits for it.
    """
    rollouts = Rollouts(greedy={} if Needs.GREEDY in service.recipe.needs else None)
    service.sample(_sample(data, service, number, rollouts, meter))
    return share_groups(rollouts, service.ranks, meter)


async def _sample(data: Data, service: RolloutService, number: int, rollouts: Rollouts, meter: Meter) -> None:
    all_prompts = data.prompts(number)
    prompts = service.shard_for_rank(all_prompts)
    group_filter = service.recipe.rollout.filter
    quota: Quota | None = None
    if service.recipe.rollout.oversample > 1:
        postponed = sum(drawn.postponed for drawn in data.order.drawn())
        needed = service.recipe.train.prompts_per_step
        quota = Quota(
            len(service.shard_for_rank(all_prompts[:needed])), len(service.shard_for_rank(all_prompts[:postponed]))
        )
    async with rollouts.scoring:  # an error cancels it
        for attempt in range(1 + (0 if group_filter is None else group_filter.max_refills)):
            trajectories = await _sample_prompts(service, prompts, (number, attempt), rollouts, meter, quota=quota)
            quota = None  # prompts that replace dropped ones are all sampled to their end
            rollouts.all += trajectories
            if group_filter is None:
                rollouts.sampled = [t for t in trajectories if t.error is None]
                break
            await rollouts.scoring.wait()
            dropped = _filter(group_filter, trajectories, rollouts, meter)
            if not dropped:
                break
            if attempt < group_filter.max_refills:
                prompts = [(group, data.spare(number, attempt, group)) for group in dropped]
                meter.count("filter/refilled", len(prompts))


async def _sample_prompts(
    service: RolloutService,
    prompts: Sequence[tuple[int, Prompt]],
    when: tuple[int, int],
    rollouts: Rollouts,
    meter: Meter,
    *,
    quota: Quota | None,
) -> list[Trajectory]:
    """Sample all prompts at once until the quota is reached, with greedy completions; score groups as they end.

    Args:
        service: Samples and scores.
        prompts: Prompts with the numbers of their groups.
        when: Numbers of the step and the attempt, on which the random numbers depend.
        rollouts: Gets the greedy completions and the tasks that score.
        meter: Takes the metrics.
        quota: Groups to wait for; None for all.
    """
    rollout = service.recipe.rollout
    number, attempt = when
    timer = BusyTimer()
    setup = service.conversation_setup(rollout.sampling, rollout.group_size, number, attempt=attempt, timer=timer)

    async def start_scoring(group: list[Trajectory]) -> None:
        rollouts.scoring.start(score_group(service, group))

    sampled = collect(setup, prompts, start_scoring, quota)
    if rollouts.greedy is None:
        trajectories = await sampled
    else:
        greedy = collect(setup.most_likely(), prompts, start_scoring)
        trajectories, completions = await run_concurrently(sampled, greedy)
        rollouts.greedy_completions |= {t.group: t for t in completions}  # the last of each group counts
    meter.max("time/engine_idle_share", timer.idle_share())
    await asyncio.sleep(0)  # the last groups' scoring starts
    return trajectories


async def score_group(service: RolloutService, group: Sequence[Trajectory]) -> None:
    """Set the scores of a group; without a reward they are 0."""
    if group:
        reward = service.recipe.reward
        scores = [Score(0.0) for _ in group] if reward is None else await service.score(reward, group)
        for trajectory, score in zip(group, scores, strict=True):
            trajectory.score = score
        await service.release(group)


def _filter(
    group_filter: GroupFilter, trajectories: Sequence[Trajectory], rollouts: Rollouts, meter: Meter
) -> list[int]:
    """Add the groups that pass the filter to `rollouts.sampled`; return the numbers of those that do not.

    Groups without all scores are in neither; trajectories on which the reward has no opinion are in no group.
    """
    groups: dict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.error is None and not has_no_opinion(trajectory):
            groups[trajectory.group].append(trajectory)
    scored = {group: rows for group, rows in groups.items() if all(t.reward is not None for t in rows)}
    dropped = [group for group, rows in scored.items() if not passes(group_filter, rows)]
    log_by_source(meter.mean, "filter/dropped", [(rows[0].prompt, float(g in dropped)) for g, rows in scored.items()])
    rollouts.sampled += [t for group, rows in scored.items() if group not in dropped for t in rows]
    return dropped


def passes(group_filter: GroupFilter, group: Sequence[Trajectory]) -> bool:
    """Check whether a group, all of whose trajectories have a reward, passes a filter."""
    with calling(group_filter, "keep"):
        verdict = group_filter.keep(group)
    require(group_filter, "keep", outputs.of_filter(verdict))
    return verdict

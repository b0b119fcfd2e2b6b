"""A step's rollouts: sampled, scored, filtered, and with a greedy answer to each prompt where the estimator asks."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rlkit.loop.metrics import Meter
from rlkit.loop.run import Run
from rlkit.roles.advantage import Needs
from rlkit.rollout.collect import Sampler, collect
from rlkit.types import Prompt, Sampling, StopReason, Trajectory


@dataclass
class Rollouts:
    """All trajectories of a step, those that are learnt from, and the greedy rewards by group if there are any."""

    all: list[Trajectory] = field(default_factory=list)
    kept: list[Trajectory] = field(default_factory=list)
    greedy: dict[int, float] | None = None


def sample(run: Run, number: int, meter: Meter) -> Rollouts:
    """Sample and score this rank's prompts; fill the places of filtered groups as often as the filter tries."""
    prompts = run.data.prompts(number)[run.fabric.global_rank :: run.fabric.world_size]
    rollouts = Rollouts(greedy={} if Needs.GREEDY in run.recipe.advantage.needs else None)
    chosen = run.recipe.rollout.filter
    tries = 0 if chosen is None else chosen.tries
    for attempt in range(tries + 1):
        with run.recipe.rollout.engine.awake():
            found = run.wait(_play(run, prompts, number, attempt, rollouts.greedy))
        rollouts.all += found
        kept = usable(found, meter)
        if rollouts.greedy is not None:
            kept = [t for t in kept if t.group in rollouts.greedy]
        dropped = _filter(run, kept, rollouts, meter)
        if not dropped or attempt == tries:
            break
        prompts = [(group, run.data.spare(number, attempt, group)) for group in dropped]
        meter.count("filter/refilled", len(prompts))
    return rollouts


async def _play(
    run: Run, prompts: Sequence[tuple[int, Prompt]], number: int, attempt: int, greedy: dict[int, float] | None
) -> list[Trajectory]:
    """Sample all prompts at once, and the greedy answers beside them."""
    rollout, seed = run.recipe.rollout, run.recipe.train.seed

    def sampler(sampling: Sampling, samples: int) -> Sampler:
        return Sampler(rollout.engine, run.tokenizer, sampling, samples, seed, number, attempt)

    async def score_group(group: list[Trajectory]) -> None:
        await finish(run, group)

    async def note_greedy(group: list[Trajectory]) -> None:
        await finish(run, group)
        if group and group[0].score is not None and group[0].score.reward is not None and greedy is not None:
            greedy[group[0].group] = group[0].score.reward

    sampled = collect(sampler(rollout.sampling, rollout.group), prompts, score_group)
    if greedy is None:
        return await sampled
    most_likely = replace(rollout.sampling, temperature=0.0)
    trajectories, _ = await asyncio.gather(sampled, collect(sampler(most_likely, 1), prompts, note_greedy))
    return trajectories


async def finish(run: Run, group: Sequence[Trajectory]) -> None:
    """Score a group."""
    if group:
        for trajectory, score in zip(group, await run.score(run.recipe.reward, group), strict=True):
            trajectory.score = score


def usable(trajectories: Sequence[Trajectory], meter: Meter) -> list[Trajectory]:
    """Leave out conversations that failed, and whole groups in which a reward did; count both."""
    failed = [t for t in trajectories if t.error is not None]
    unscored = [t for t in trajectories if t.error is None and (t.score is None or t.score.reward is None)]
    dropped = {t.group for t in unscored}
    kept = [t for t in trajectories if t.error is None and t.group not in dropped]
    meter.count("rollout/failed", len(failed))
    meter.count("reward/failed", len(unscored))
    meter.count("reward/groups_dropped", len(dropped))
    meter.count("rollout/tokens", sum(t.response_length for t in trajectories))
    meter.means("rollout/length", [t.response_length for t in trajectories])
    meter.means("rollout/stopped", [t.stop is StopReason.STOP for t in trajectories])
    for t in kept:
        meter.max("rollout/length_max", t.response_length)
        if t.score is not None and t.score.reward is not None:
            meter.mean("reward/mean", t.score.reward)
            for name, value in t.score.parts.items():
                meter.mean("accuracy" if name == "accuracy" else f"reward/{name}", value)
    return kept


def _filter(run: Run, trajectories: Sequence[Trajectory], rollouts: Rollouts, meter: Meter) -> list[int]:
    """Keep the groups that the filter keeps; give the others' places."""
    groups: dict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.group].append(trajectory)
    chosen = run.recipe.rollout.filter
    dropped = [] if chosen is None else [g for g, members in groups.items() if not chosen.keep(members)]
    if chosen is not None:
        meter.means("filter/dropped", [float(g in dropped) for g in groups])
    rollouts.kept += [t for t in trajectories if t.group not in dropped]
    return dropped

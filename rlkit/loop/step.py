"""A step: sample, score, collate, judge, credit, learn, publish."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rlkit.loop.learn import learn
from rlkit.loop.metrics import Meter, memory_mb
from rlkit.loop.optim import learning_rate, set_learning_rate
from rlkit.loop.run import Run
from rlkit.ops.batching import micro_batches
from rlkit.ops.groups import group_stats
from rlkit.rollout.collate import collate
from rlkit.rollout.collect import Sampler, collect
from rlkit.types import Batch, Prompt, StopReason, Trajectory


def step(run: Run, number: int) -> tuple[list[Trajectory], dict[str, float]]:
    """Make one step of training (the first is 1); give its trajectories and figures."""
    meter = Meter()
    train = run.recipe.train
    prompts = run.data.prompts(number)[run.fabric.global_rank :: run.fabric.world_size]
    with _timed(meter, "sample"):
        trajectories = sample(run, prompts, number)
    kept = select(trajectories, meter)
    batch = collate(kept).to(run.device)
    with _timed(meter, "judge"):
        judge(run, batch)
    run.recipe.advantage.estimate(batch)
    rate = learning_rate(train, number)
    set_learning_rate(run.optimizer, rate)
    with _timed(meter, "learn"):
        learn(run, batch, number, meter)
    with _timed(meter, "publish"):
        run.version += 1
        run.publish()
    describe(batch, meter)
    meter.max("lr", rate)
    meter.max("version", run.version)
    meter.max("memory/rss_mb", memory_mb())
    figures = meter.result() | {f"engine/{k}": v for k, v in run.recipe.rollout.engine.health().items()}
    figures["time/tokens_per_second"] = figures.get("rollout/tokens", 0.0) / max(figures["time/sample"], 1e-9)
    return trajectories, figures


def sample(run: Run, prompts: Sequence[tuple[int, Prompt]], number: int) -> list[Trajectory]:
    """Sample and score the prompts' groups."""
    recipe = run.recipe
    sampler = Sampler(
        recipe.rollout.engine, run.tokenizer, recipe.rollout.sampling, recipe.rollout.group, recipe.train.seed, number
    )
    with recipe.rollout.engine.awake():
        return run.wait(collect(sampler, prompts, lambda group: finish(run, group)))


async def finish(run: Run, group: Sequence[Trajectory]) -> None:
    """Score a group."""
    if group:
        for trajectory, score in zip(group, await run.score(run.recipe.reward, group), strict=True):
            trajectory.score = score


def select(trajectories: Sequence[Trajectory], meter: Meter) -> list[Trajectory]:
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


@torch.no_grad()
def judge(run: Run, batch: Batch) -> None:
    """Compute the log-probs that the recipe needs before learning: the old policy's, and the reference's.

    With one optimizer step a rollout the old policy's are those of the learning pass itself.
    """
    train, temperature = run.recipe.train, run.recipe.rollout.sampling.temperature
    if not train.on_policy:
        batch.old_logps = torch.zeros_like(batch.rollout_logps)
    if run.reference is not None:
        batch.ref_logps = torch.zeros_like(batch.rollout_logps)
    if batch.old_logps is None and batch.ref_logps is None:
        return
    lengths: list[int] = batch.attention.sum(-1).tolist()
    for rows in micro_batches(lengths, train.micro_tokens):
        part = batch.rows(torch.tensor(rows, device=run.device))
        width = part.tokens.shape[1]
        with run.autocast():
            if batch.old_logps is not None:
                batch.old_logps[rows, :width] = run.actor(part.tokens, part.mask, temperature).logps
            if run.reference is not None and batch.ref_logps is not None:
                batch.ref_logps[rows, :width] = run.reference.logps(part.tokens, part.mask, temperature)


def describe(batch: Batch, meter: Meter) -> None:
    """Measure the rewards' spread, the groups without signal, and the gap between engine and trainer."""
    stats = group_stats(batch.rewards, batch.group)
    meter.means("reward/std", stats.std.tolist())
    meter.means("groups/no_signal", stats.equal.float().tolist())
    if batch.old_logps is None or not bool(batch.mask.any()):
        return
    gap: Tensor = (batch.old_logps - batch.rollout_logps)[batch.mask].abs()
    meter.mean("mismatch/mean", gap.mean(), weight=len(gap))
    meter.max("mismatch/max", gap.max())


@contextmanager
def _timed(meter: Meter, phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    meter.max(f"time/{phase}", time.perf_counter() - start)

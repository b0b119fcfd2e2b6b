"""Validation: held-out prompts answered greedily and by sampling."""

from __future__ import annotations

from dataclasses import replace

from rlkit.rollout.collect import collect
from rlkit.sections import Validation
from rlkit.train.metrics import Meter
from rlkit.train.rollouts import describe, finish
from rlkit.train.run import Run
from rlkit.types import Sampling, Trajectory

NAMES = {
    "accuracy": "accuracy",
    "reward/mean": "reward",
    "rollout/length": "length",
    "rollout/stopped": "stopped",
    "rollout/failed": "failed",
    "reward/failed": "unscored",
}
"""A step's figures that validation has too, and what they are called there."""

STEP = 0
"""Validation draws its random numbers as a step of its own, so that before and after are compared on the same ones."""


def evaluate(run: Run) -> tuple[list[Trajectory], dict[str, float]]:
    """Answer the validation prompts; give the trajectories and the figures, sampled ones under `sampled_`.

    Failed answers and scores are counted and left out of the means.
    """
    recipe, section = run.recipe, run.recipe.validation or Validation()
    sampled = section.sampling or recipe.rollout.sampling
    greedy = replace(sampled, temperature=0.0, top_p=1.0, top_k=0)
    with run.awake():
        trajectories, figures = _answer(run, greedy, 1, "")
        if section.samples:
            more, sampled_figures = _answer(run, sampled, section.samples, "sampled_")
            trajectories, figures = [*trajectories, *more], figures | sampled_figures
    return trajectories, figures


def _answer(run: Run, sampling: Sampling, samples: int, prefix: str) -> tuple[list[Trajectory], dict[str, float]]:
    prompts = run.shard_for_rank(list(enumerate(run.data.validation)))
    sampler = run.sampler(sampling, samples, STEP)
    trajectories = run.sample(collect(sampler, prompts, lambda group: finish(run, group)))
    meter = Meter()
    describe(trajectories, meter)
    return trajectories, {f"{prefix}{NAMES[n]}": value for n, value in meter.result(run.ranks).items() if n in NAMES}

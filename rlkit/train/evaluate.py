"""Validation: held-out prompts answered greedily and by sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlkit.rollout.collect import collect
from rlkit.rollout.service import RolloutService
from rlkit.sections import Validation
from rlkit.train.metrics import Meter
from rlkit.train.rollouts import describe, finish
from rlkit.types import Prompt, Sampling, Trajectory

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


def evaluate(service: RolloutService, prompts: Sequence[Prompt]) -> tuple[list[Trajectory], dict[str, float]]:
    """Answer the validation prompts; return the trajectories and the figures, sampled ones under `sampled_`.

    Failed answers and scores are counted and left out of the means.
    """
    recipe = service.recipe
    section = recipe.validation or Validation()
    sampled = section.sampling or recipe.rollout.sampling
    greedy = replace(sampled, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    with service.engine_on_device():
        trajectories, figures = _answer(service, prompts, greedy, 1)
        if section.samples:
            more, sampled_figures = _answer(service, prompts, sampled, section.samples)
            trajectories = [*trajectories, *more]
            figures |= {f"sampled_{name}": value for name, value in sampled_figures.items()}
    return trajectories, figures


def _answer(
    service: RolloutService, prompts: Sequence[Prompt], sampling: Sampling, samples: int
) -> tuple[list[Trajectory], dict[str, float]]:
    mine = service.shard_for_rank(list(enumerate(prompts)))
    sampler = service.sampler(sampling, samples, STEP)
    trajectories = service.sample(collect(sampler, mine, lambda group: finish(service, group)))
    meter = Meter()
    describe(trajectories, meter)
    return trajectories, {NAMES[name]: value for name, value in meter.result(service.ranks).items() if name in NAMES}

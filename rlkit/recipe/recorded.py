"""Checks of where completions, rewards and advantages come from."""

from __future__ import annotations

from collections.abc import Iterator

from rlkit.interfaces.loss import Inputs
from rlkit.recipe.recipe import Recipe

SAMPLED = (
    "teacher", "kl_reward", "correction", "rejection", "shaping", "tools", "interaction", "environment", "conversation",
)  # fmt: skip
"""Sections that concern sampled completions."""


def check_recorded(recipe: Recipe) -> Iterator[str]:
    """Yield a problem for each section that is missing, and each that does not fit recorded completions."""
    loss, recorded = recipe.loss, recipe.rollout.engine.recorded
    name = type(loss).__name__
    if Inputs.ADVANTAGES in loss.inputs and recipe.advantage is None and recipe.teacher is None:
        yield f"loss {name} reads advantages, but the recipe has no `advantage:`; add one, such as advantage: GRPO"
    if Inputs.ADVANTAGES not in loss.inputs:
        for section in ("advantage", "critic", "teacher"):
            if getattr(recipe, section) is not None and not (section == "teacher" and loss.forward.teacher_top):
                yield f"loss {name} reads no advantages, but the recipe has a section `{section}:`; remove it"
    is_distilled = recipe.teacher is not None and recipe.advantage is None
    if recipe.reward is None and not recorded and Inputs.REWARDS in loss.inputs and not is_distilled:
        yield f"loss {name} reads rewards, but the recipe has no `reward:`; add one, such as reward: MathReward"
    if recipe.reward is None and recipe.validation is not None and recipe.generates:
        yield "validation scores completions, but the recipe has no `reward:`; add one, or set validation: null"
    if recorded:
        yield from _check_engine(recipe)


def _check_engine(recipe: Recipe) -> Iterator[str]:
    rollout = recipe.rollout
    recorded = "rollout.engine is Recorded, whose completions no policy has sampled, but"
    temperature = rollout.sampling.temperature
    for section in SAMPLED:
        if getattr(recipe, section) and not (section == "teacher" and recipe.loss.forward.teacher_top):
            yield f"{recorded} the recipe has a section `{section}:`; remove it"
    if rollout.filter is not None:
        yield f"{recorded} the recipe has a rollout.filter; remove it"
    if recipe.train.old_logps != "recompute":
        yield f"{recorded} train.old_logps is {recipe.train.old_logps}; set it to recompute"
    if temperature != 1:
        yield f"{recorded} rollout.sampling.temperature is {temperature}; set validation.sampling instead"
    if rollout.oversample > 1:
        yield f"{recorded} rollout.oversample is {rollout.oversample}; set it to 1"

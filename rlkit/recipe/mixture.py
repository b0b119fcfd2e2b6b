"""Checks of mixtures: what a step learns from besides its own rollouts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlkit.recipe.recipe import Recipe
from rlkit.sections import Mixture


def check_mixtures(recipe: Recipe) -> Iterator[str]:
    """Yield what is wrong with the section `mix`."""
    for name, mixture in (recipe.mix or {}).items():
        if not re.fullmatch(r"[\w-]+", name):
            yield f"mix has the name {name!r}, expected letters, digits, _ and -, as in metrics and options"
        if mixture.loss is not None or not recipe.generates:
            yield from _check_loss(recipe, f"mix.{name}", mixture)
        yield from _check_stream(recipe, f"mix.{name}", mixture)


def _check_loss(recipe: Recipe, key: str, mixture: Mixture) -> Iterator[str]:
    loss, called = mixture.loss, "CrossEntropy" if mixture.loss is None else type(mixture.loss).__name__
    if loss is not None and (loss.reads_advantages or loss.compares):
        yield f"{key}.loss {called} reads advantages or old log-probs, which no mixture has; choose CrossEntropy"
    if loss is not None and loss.teacher_top:
        yield f"{key}.loss {called} compares with a teacher, which no mixture has; choose CrossEntropy"
    if (loss is not None and loss.reads_scores) == recipe.generates:
        head, fits = ("lm", "CrossEntropy") if recipe.generates else ("score", "BradleyTerry")
        yield f"{key}.loss {called} does not go with model.head: {head}; choose {fits}"
    if mixture.task is None and loss is not None and loss.reads_rewards:
        yield f"{key}.loss {called} compares answers by their rewards, but {key} has no task; add one, with rewards"


def _check_stream(recipe: Recipe, key: str, mixture: Mixture) -> Iterator[str]:
    train, rollout = recipe.train, recipe.rollout
    prompts = mixture.prompts_per_step
    if mixture.task is None:
        if prompts is not None:
            yield f"{key}.prompts_per_step is {prompts}, but {key} has no task to take them from; add one, or remove it"
        if not (recipe.tools or recipe.interaction or recipe.environment or rollout.engine.recorded):
            yield (
                f"{key} has no task, so that it learns what tools, users and environments wrote, but the recipe has "
                f"none of these; add {key}.task"
            )
    if prompts is not None and prompts < train.minibatches:
        yield (
            f"{key}.prompts_per_step is {prompts}, but train.minibatches is {train.minibatches} and a group is never "
            f"divided; set it to {train.minibatches} or more"
        )

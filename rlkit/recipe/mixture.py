"""Checks of mixtures: the streams of recorded completions that a step trains on besides its rollouts."""

from __future__ import annotations

from collections.abc import Iterator

from rlkit.interfaces.loss import Inputs
from rlkit.recipe.recipe import Recipe
from rlkit.sections import Mixture


def check_mixtures(recipe: Recipe) -> Iterator[str]:
    """Yield the problems of the section `mix`."""
    for name, mixture in (recipe.mix or {}).items():
        yield from _check_loss(recipe, f"mix.{name}", mixture)
        yield from _check_stream(recipe, f"mix.{name}", mixture)


def _check_loss(recipe: Recipe, key: str, mixture: Mixture) -> Iterator[str]:
    loss = mixture.loss
    if loss is None:
        if not recipe.generates:
            yield f"{key}.loss is CrossEntropy, which does not fit model.head: score; set it to BradleyTerry"
        return
    name = type(loss).__name__
    if Inputs.ADVANTAGES in loss.inputs or Inputs.OLD_LOGPS in loss.inputs:
        yield f"{key}.loss {name} reads advantages or old log-probs, but a mixture has none; choose CrossEntropy"
    elif loss.forward.teacher_top:
        yield f"{key}.loss {name} reads a teacher, but a mixture has none; choose CrossEntropy"
    elif (Inputs.SCORES in loss.inputs) == recipe.generates:
        yield f"{key}.loss {name} does not fit model.head: {recipe.model.head}; choose another loss"
    elif Inputs.REWARDS in loss.inputs and mixture.task is None:
        yield f"{key}.loss {name} compares completions by their rewards, but {key} has no task; add one, with rewards"


def _check_stream(recipe: Recipe, key: str, mixture: Mixture) -> Iterator[str]:
    train, rollout = recipe.train, recipe.rollout
    prompts = mixture.prompts_per_step
    if mixture.task is None:
        if prompts is not None:
            yield f"{key}.prompts_per_step is {prompts}, but {key} has no task to draw them from; add one, or remove it"
        if not (recipe.tools or recipe.interaction or recipe.environment or rollout.engine.recorded):
            yield (
                f"{key} has no task, so it trains on the replies of tools, users and environments, but the recipe has "
                f"none of these; add {key}.task"
            )
    if prompts is not None and prompts < train.minibatches:
        yield (
            f"{key}.prompts_per_step is {prompts}, but train.minibatches is {train.minibatches}, and a group is never "
            f"divided; set it to {train.minibatches} or more"
        )

"""A mixture as a recipe of its own: another task and another loss for the same model and optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from rlkit.base.errors import RecipeError
from rlkit.engines import Recorded
from rlkit.losses import CrossEntropy
from rlkit.recipe import Mixture, Recipe, Rollout


def recipe_of(mixture: Mixture, recipe: Recipe) -> Recipe:
    """Return the recipe of a mixture, of which nothing else of the run's has a part in the loss."""
    sampling = replace(recipe.rollout.sampling, temperature=1.0)
    answered = replace(recipe.rollout, sampling=sampling)
    return Recipe(
        model=recipe.model,
        task=mixture.task or recipe.task,
        rollout=answered if mixture.task is None else Rollout(Recorded(), overlong=recipe.rollout.overlong),
        loss=mixture.loss or CrossEntropy(),
        train=replace(
            recipe.train,
            prompts_per_step=mixture.prompts_per_step or recipe.train.prompts_per_step,
            max_rows=None,
            aggregation=None,
            entropy_coef=0.0,
            router_aux_loss_coef=0.0,
            old_logps="recompute",
            off_policy_mask_threshold=None,
            mask_truncated=False,
        ),
        validation=None,
        fabric=recipe.fabric,
    )


@contextmanager
def naming_mixture(mixture: str) -> Iterator[None]:
    """Name a mixture in errors about its data."""
    try:
        yield
    except RecipeError as error:
        raise type(error)(f"mix.{mixture}: {error}") from error

"""The trainer's own code for a model beside the policy, for processes that have such a model in the trainer's place."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from rlkit.base.files import MAX_JSON_BYTES, read_inside
from rlkit.base.text import REFERENCE
from rlkit.recipe import Recipe
from rlkit.recipe.parsing.compose import Composer
from rlkit.recipe.parsing.references import refuse_references
from rlkit.registry import load_plugins
from rlkit.train.logps import begin_logps, begin_values, frozen_top
from rlkit.train.metrics import Meter
from rlkit.train.models import Placer, load_critic, load_teacher
from rlkit.train.optim import set_learning_rate
from rlkit.train.update import MiniBatch, update_critic

__all__ = [
    "Meter", "MiniBatch", "Placer", "begin_logps", "begin_values", "frozen_top", "load_critic", "load_teacher",
    "placed_recipe", "set_learning_rate", "update_critic",
]  # fmt: skip


READ = ("model", "train", "critic", "teacher", "save", "placement")
"""The sections that a pool reads; others may have objects of Python, which only the trainer has."""


def placed_recipe(folder: Path, pool: str) -> Recipe:
    """Return the sections of a run folder's recipe that a pool reads, with its `fabric:` for the trainer's; unchecked.

    Credentials, which the folder has not, are texts without a meaning: a pool uses none.

    Raises:
        RecipeError: It cannot be read here.
    """
    for name in REFERENCE.findall(read_inside(folder, "recipe.yaml", MAX_JSON_BYTES).decode()):
        os.environ.setdefault(name, "withheld")
    composer = Composer(load_plugins())
    composer.add_file(folder / "recipe.yaml")
    refuse_references(composer.tree, folder)
    rollout = composer.tree["rollout"]
    assert isinstance(rollout, dict)
    sampled = {name: rollout[name] for name in ("engine", "sampling")}
    composer.tree = {name: composer.tree[name] for name in READ} | {"rollout": sampled, "task": None, "loss": None}
    recipe = composer.finish()
    assert recipe.placement is not None
    return replace(recipe, fabric=recipe.placement.pools[pool])

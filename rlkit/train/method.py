"""The ways to train: reinforcement learning on samples, and supervised training on recorded completions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rlkit.recipe import Recipe
from rlkit.train.phases import StepResult
from rlkit.train.rl import rl_step
from rlkit.train.rollouts import Obtain, recorded
from rlkit.train.sampling import sample
from rlkit.train.setup import TrainContext
from rlkit.train.supervised import supervised_step


class Method(NamedTuple):
    """A way to train.

    Args:
        obtain: Returns the rollouts of a step.
        step: Runs a step; it gets its number and what returns its rollouts.
    """

    obtain: Obtain
    step: Callable[[TrainContext, int, Obtain], StepResult]


def method_of(recipe: Recipe) -> Method:
    """Return the way to train that a recipe's engine asks for."""
    return Method(recorded, supervised_step) if recipe.rollout.engine.recorded else Method(sample, rl_step)

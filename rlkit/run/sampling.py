"""Conversations with a policy that is not trained: what verbs do with a recipe's model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from lightning.fabric import Fabric

from rlkit.data.data import Data
from rlkit.recipe import Recipe
from rlkit.rollout.collect import collect
from rlkit.rollout.service import RolloutService
from rlkit.train.sampling import score_group
from rlkit.train.setup import prepare_rollouts
from rlkit.types import Prompt, Trajectory


@contextmanager
def sampling_service(recipe: Recipe, data: Data, fabric: Fabric) -> Iterator[RolloutService]:
    """Load the policy and its engine, with equal weights, and close them at the end; all ranks must call this.

    Args:
        recipe: Checked.
        data: Loaded for the recipe.
        fabric: Launched.
    """
    service = prepare_rollouts(recipe, data, fabric)
    try:
        service.sync_weights()
        yield service
    finally:
        service.close()


def sample(
    service: RolloutService, prompts: Sequence[tuple[int, Prompt]], samples: int = 1, *, scored: bool = False
) -> list[Trajectory]:
    """Hold conversations with the policy, as in the first step of a run; return them by prompt.

    Args:
        service: Of this rank.
        prompts: Those of this rank, with their numbers.
        samples: Conversations of each prompt.
        scored: Whether the recipe's reward scores them.
    """
    setup = service.conversation_setup(service.recipe.rollout.sampling, samples, step=0)
    return service.sample(collect(setup, prompts, partial(score_group, service) if scored else _unscored))


async def _unscored(group: Sequence[Trajectory]) -> None:
    """Leave the group without scores."""

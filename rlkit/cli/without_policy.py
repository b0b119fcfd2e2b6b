"""Parts that are used without a run: rewards and tools, bound while no policy is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from rlkit.base.errors import RecipeError
from rlkit.base.text import part_name
from rlkit.distributed.offload import use_device
from rlkit.interfaces.runtime import BoundPart
from rlkit.recipe import Recipe
from rlkit.registry import calling
from rlkit.rollout.loop import EventLoop, close_on_loop
from rlkit.rollout.workers import Workers
from rlkit.train.runtime import NoPolicyError, RuntimeWithoutPolicy
from rlkit.train.setup import fabric_for


@dataclass(frozen=True)
class Bound:
    """What parts are bound to, the event loop that they run on, and the workers for plain code."""

    runtime: RuntimeWithoutPolicy
    loop: EventLoop
    workers: Workers


@contextmanager
def bound_without_policy(recipe: Recipe, *used: BoundPart) -> Iterator[Bound]:
    """Bind parts of a recipe, and close them at the end.

    Raises:
        RecipeError: One needs the policy as soon as it is bound.
        PartError: One raised.
    """
    fabric = fabric_for(recipe)
    with ExitStack() as stack:
        loop = EventLoop(partial(use_device, fabric.device))
        stack.callback(loop.close)
        workers = Workers(recipe.concurrency or min(4, os.cpu_count() or 1))
        stack.callback(workers.close)

        stack.callback(lambda: loop.run(close_on_loop(used)))
        runtime = RuntimeWithoutPolicy(recipe, fabric, workers)
        for part in used:
            try:
                with calling(part, "bind"):
                    part.bind(runtime)
            except NoPolicyError as error:
                raise RecipeError(
                    f"{part_name(part)} asks for {error}, the policy of a run, which is not loaded here; choose another"
                ) from error
        yield Bound(runtime, loop, workers)

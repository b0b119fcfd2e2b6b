"""What `rlkit recipe check` checks, and the GPU that it plans for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lightning.fabric import Fabric

from rlkit.api.checks import fabric_elsewhere
from rlkit.api.policy import fabric_for
from rlkit.base.errors import RecipeError, UnavailableError, show
from rlkit.models.activations import token_limit
from rlkit.recipe import Recipe
from rlkit_inspect.gpus import Gpu, gpu_named


@dataclass(frozen=True)
class Target:
    """What is checked, and the GPU that it is planned for.

    Args:
        recipe: With the micro-batches of that GPU.
        deep: Whether models are loaded.
        gpu: None for this machine's device.
        price: Price of a GPU per hour, if it was given.
    """

    recipe: Recipe
    deep: bool
    gpu: Gpu | None
    price: float | None

    @classmethod
    def of(cls, recipe: Recipe, deep: bool, gpu_name: str | None, price_text: str | None) -> Target:
        """Read the target of a plan from the options of a command line.

        Raises:
            RecipeError: The GPU is unknown, its price is no price, or `--deep` is to measure on another machine.
        """
        price = None if price_text is None else _price(price_text)
        if gpu_name is None:
            return cls(recipe, deep, None, price)
        if deep:
            raise RecipeError("--deep measures on this machine, and --gpu plans for another; choose one of them")
        gpu = gpu_named(gpu_name)
        try:
            limit = token_limit(recipe, gpu.memory)
        except UnavailableError:  # said once the data is loaded
            return cls(recipe, False, gpu, price)
        train = replace(recipe.train, max_tokens_per_micro_batch=limit)
        return cls(replace(recipe, train=train), False, gpu, price)

    def fabric(self) -> Fabric:
        """Return the recipe's Fabric, on this machine's CPU if it is planned for a GPU elsewhere."""
        return fabric_for(self.recipe) if self.gpu is None else fabric_elsewhere(self.recipe)

    def is_gpu(self, fabric: Fabric) -> bool:
        """Whether a GPU would train: the one that is planned for, or this machine's."""
        return self.gpu is not None or fabric.device.type == "cuda"


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 < price < math.inf:
        raise RecipeError(f"--price is {show(text)}, expected the price of a GPU per hour, such as 2.5")
    return price

"""Whether the routers of a mixture of experts select the experts that the engine selected."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rlkit.base.errors import RecipeError
from rlkit.interfaces.engine import Capability
from rlkit.models.activations import precision_of
from rlkit.models.actor import Actor
from rlkit.models.config import experts_of
from rlkit.models.lora import base_model
from rlkit.models.size import find_config
from rlkit.recipe import Recipe

NO_EXPERTS = "the model has no experts"
NO_SAMPLES = "this recipe samples nothing"


def replay_problem(recipe: Recipe, on_gpu: bool | None = None) -> str | None:
    """Explain why routes are not replayed, by the recipe, the device and the model's configuration.

    `auto` leaves it out where it changes nothing: in float32, TorchEngine and the trainer, which share their layers,
    select the same experts; in 16 bits they differ for about 3% of tokens and layers, and replay divides the KL
    divergence between them by ten (a random Qwen3-MoE with 8 of 64 experts in 8 layers).

    Args:
        recipe: Checked.
        on_gpu: Whether the run uses a GPU; None to ask this machine.

    Raises:
        RecipeError: The configuration cannot be read; UnavailableError if the hub cannot be reached.
    """
    engine = recipe.engine
    if Capability.VALIDATION_ONLY in recipe.rollout.engine.capabilities:
        return NO_SAMPLES
    if not experts_of(find_config(recipe.model)):
        return NO_EXPERTS
    if recipe.train.router_replay is False:
        return "train.router_replay is false"
    if on_gpu is None:
        on_gpu = torch.cuda.is_available() and recipe.fabric.accelerator not in ("cpu", "mps")
    asked = recipe.train.router_replay is True
    problem = engine.routes_problem(recipe.rollout.sampling, on_gpu, asked)
    has_same_layers = Capability.READS_POLICY in engine.capabilities
    if problem is None and has_same_layers and not asked and precision_of(recipe.model, recipe.fabric) == "float32":
        return f"{type(engine).__name__} and the trainer select the same experts in float32"
    return problem


def require_replay(recipe: Recipe) -> None:
    """Refuse `train.router_replay: true` where nothing can be replayed.

    Raises:
        RecipeError: The model, the engine or the way to train prevents it.
    """
    problem = replay_problem(recipe) if recipe.train.router_replay is True else None
    if problem is not None:
        raise RecipeError(f"train.router_replay is true, but {problem}; set it to false or auto")


def start_replay(recipe: Recipe, actor: Actor, note: Callable[[str], None]) -> None:
    """Have the engine return routes if they are replayed; it is not bound yet.

    Args:
        recipe: Checked.
        actor: The policy.
        note: Shows a warning, if the model's code prevents it.

    Raises:
        RecipeError: `train.router_replay` is true, but the model has no routers that rlkit knows.
    """
    if replay_problem(recipe) is not None:
        return
    if actor.routers is not None:
        recipe.engine.return_routes(actor.routers, required=recipe.train.router_replay is True)
        return
    problem = f"{type(base_model(actor.policy)).__name__} has no routers that select by topk"
    if recipe.train.router_replay is True:
        raise RecipeError(f"train.router_replay is true, but {problem}; set it to false or auto")
    note(f"experts: not replayed: {problem}")

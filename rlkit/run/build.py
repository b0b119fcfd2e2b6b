"""A composed recipe, built: the engine and the precision that it leaves open are chosen for this machine.

No engine's product is named here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import torch

from rlkit.base.errors import RecipeError, RlkitError
from rlkit.interfaces.engine import RolloutEngine
from rlkit.recipe import FSDP2, Fabric, Recipe, check
from rlkit.recipe.credentials import as_yaml
from rlkit.recipe.parsing.compose import Composer, plain_data

if TYPE_CHECKING:
    from rlkit.models.size import Size

GIB = 2**30
HEADS = (64, 128, 256)
"""Sizes of attention heads that the kernels of all products compute."""

SHARE = 0.4
"""Share of the memory besides the trainer's that an engine may use."""

BESIDE_WEIGHTS = 3 * GIB
"""Memory that an engine needs beside its weights: a small cache of keys and values, graphs, CUDA's context."""


BFLOAT16 = ("avx512_bf16", "amx_bf16")
"""Features of a CPU that multiplies bfloat16 about twice as fast as float32, by their names in `lscpu`."""


def build(composer: Composer, *, for_gpu: bool = False) -> tuple[Recipe, str]:
    """Return a composed recipe, its parts built and checked, and as YAML with every option filled in.

    Args:
        composer: All recipe files and options.
        for_gpu: Whether the recipe is planned for a GPU that this machine may lack; all of `GPUS` have bfloat16.

    Raises:
        RecipeError: Something is unknown, missing, of the wrong type, or does not fit the rest.
    """
    recipe = composer.finish()
    if recipe.fabric.precision == "auto":
        precision = "bf16-mixed" if for_gpu else choose_precision(recipe.fabric.accelerator)
        composer.add({"fabric": {"precision": precision}})
        recipe = composer.finish()
    if composer.has_default_engine:
        parts = composer.registry.parts["engines"].values()
        engine, reason = choose_engine(recipe, [part.cls for part in parts])
        if engine is not None:
            spec = {"class_path": engine.__name__, "init_args": engine.default_options}
            composer.add({"rollout": {"engine": spec}})
            recipe = composer.finish()
        recipe.rollout.engine.chosen = reason
    try:
        check(recipe)
    except RecipeError as error:
        located = [line + composer.problems.location(line.partition(" ")[0]) for line in str(error).split("\n")]
        raise RecipeError("\n".join(located)) from error
    return recipe, as_yaml(plain_data(composer.values))


def choose_precision(accelerator: str) -> Literal["bf16-mixed", "32-true"]:
    """Resolve `fabric.precision: auto` on this machine: `bf16-mixed` if it is the faster one there.

    Args:
        accelerator: That of the recipe.
    """
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        is_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.backends.mps.is_available())
        fast = is_cpu and any(torch.cpu.get_capabilities().get(name) for name in BFLOAT16)
    return "bf16-mixed" if fast else "32-true"


def choose_engine(recipe: Recipe, parts: Iterable[type]) -> tuple[type[RolloutEngine] | None, str]:
    """Return the fastest engine that is installed and fits a recipe on this machine's GPUs, and why it is chosen.

    The engine is None, for the default, if none fits or if there is no GPU; then the reason says why not, or is empty.

    Args:
        recipe: A recipe that names no engine.
        parts: The registered engines.
    """
    if recipe.fabric.accelerator in ("cpu", "mps") or not torch.cuda.is_available() or recipe.model.scores:
        return None, ""
    engines = [part for part in parts if issubclass(part, RolloutEngine) and part.preference]
    reasons: list[str] = []
    for engine in sorted(engines, key=lambda part: part.preference, reverse=True):
        problem = engine.missing() or _misfit(recipe, engine)
        if problem is None:
            return engine, "; ".join(["the fastest that is installed and fits", *reasons])
        reasons.append(f"not {engine.__name__}: {problem}")
    return None, "; ".join(reasons)


def _misfit(recipe: Recipe, engine: type[RolloutEngine]) -> str | None:
    """Return the reason why an engine does not fit a recipe; None if it does."""
    from rlkit.models.activations import precision_of
    from rlkit.models.config import load_config
    from rlkit.models.size import size_of
    from rlkit.models.vision import reads_pictures

    model = recipe.model
    if model.trust_remote_code:
        return "model.trust_remote_code is true"
    if precision_of(model, recipe.fabric) != "mixed":
        return f"fabric.precision is {recipe.fabric.precision}, expected bf16-mixed, in which servers are fast"
    try:
        config = load_config(model)
        size = size_of(config, model.lora, vision=model.vision)
    except RlkitError:  # reported when the model is loaded
        return "the configuration of model.path cannot be read"
    if reads_pictures(config) and config.model_type not in engine.picture_models:
        return f"it does not serve pictures of model_type {config.model_type}"
    architecture = (getattr(config, "architectures", None) or ["no model class"])[0]
    if not engine.implements(architecture):
        return f"it does not implement {architecture}"
    text = size.config
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if head not in HEADS:
        return f"attention heads of {head}, expected {', '.join(map(str, HEADS))}"
    return _shortage(recipe, size)


def _shortage(recipe: Recipe, size: Size) -> str | None:
    """Return the memory that an engine lacks on the smallest GPU of a run, if it does."""
    count = torch.cuda.device_count()
    gpus = _gpus(recipe.fabric, count)
    memory = [torch.cuda.get_device_properties(index).total_memory for index in gpus if index < count]
    trainer = 0 if recipe.train.offload_during_rollout else _trainer_bytes(recipe, size, _shards(recipe.fabric, gpus))
    free = min(memory, default=0) - trainer
    needed = 2 * size.base + BESIDE_WEIGHTS
    if needed <= SHARE * free:
        return None
    return f"it needs {needed / GIB:.1f} GiB, and beside the trainer it has {max(0.0, SHARE * free) / GIB:.1f}"


def _gpus(fabric: Fabric, count: int) -> Sequence[int]:
    """Return the indices of the GPUs that train on a machine with `count` of them; Fabric refuses indices beyond."""
    if isinstance(fabric.devices, list):
        return fabric.devices
    return range(count if fabric.devices == "auto" else fabric.devices)


def _shards(fabric: Fabric, gpus: Sequence[int]) -> int:
    """Return the number of ranks that a model's weights are divided among, given a node's GPUs."""
    if not fabric.shards:
        return 1
    replicate = fabric.strategy.replicate if isinstance(fabric.strategy, FSDP2) else 1
    return max(1, len(gpus) * fabric.num_nodes // replicate)


def _trainer_bytes(recipe: Recipe, size: Size, shards: int) -> float:
    """Return the bytes of weights, gradients and optimizer states on a rank, and of models that are not trained."""
    from rlkit.models.activations import frozen_bytes

    frozen_width = frozen_bytes(recipe.model, recipe.fabric)
    teachers = {} if recipe.teacher is None or recipe.teacher.urls is not None else recipe.teacher.paths()
    models = {"reference": int(recipe.needs_reference and not size.lora), "teacher": len(set(teachers.values()))}
    frozen = sum(count for role, count in models.items() if role not in recipe.placed)
    trained = 1 + (recipe.critic is not None and "critic" not in recipe.placed)
    trained_bytes = 16 * size.trained + frozen_width * (size.base + size.lora - size.trained)
    saved = size.base * frozen_width - size.base_bytes(frozen_width, recipe.model.quantization)
    return (trained * trained_bytes - saved + frozen * frozen_width * size.base) / shards

"""`--checkpoint`: which policy a verb that trains nothing takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlkit.errors import CheckpointError, RecipeError
from rlkit.models.source import locate
from rlkit.run.launch import home_of

CHECKPOINT: tuple[str, dict[str, Any]] = (
    "--checkpoint",
    {"type": str, "help": "A run folder, its final/ or a checkpoint: the policy, and the recipe if none is given."},
)


def with_checkpoint(argv: Sequence[str]) -> list[str]:
    """Return the arguments with what `--checkpoint` means: its policy, and the recipe of its run if none is given.

    Raises:
        RecipeError: It is given no path.
        CheckpointError: There is no policy.
    """
    own = list(argv)
    flags = [i for i, argument in enumerate(own) if argument.partition("=")[0] == "--checkpoint"]
    if not flags:
        return own
    _, joined, place = own[flags[-1]].partition("=")
    place = place if joined else next(iter(own[flags[-1] + 1 :]), "")
    if not place or place.startswith("--"):
        raise RecipeError("--checkpoint has no value, expected a run folder, its final/ or a checkpoint")
    source = locate(place)
    if source.base is None and not Path(source.place, "config.json").is_file():
        raise CheckpointError(f"--checkpoint is {place!r}, expected a run folder, its final/ or a checkpoint")
    if not any(argument.partition("=")[0] == "--recipe" for argument in own) and (home := home_of(place)):
        own = ["--recipe", str(home / "recipe.yaml"), *own]
    lora = "null" if source.lora is None else json.dumps(asdict(source.lora))
    return [*own, f"--model.path={source.place}", f"--model.lora={lora}"]

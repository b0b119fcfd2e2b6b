"""`--checkpoint`: which policy a verb that trains nothing takes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlkit.errors import CheckpointError, RecipeError
from rlkit.models.source import locate
from rlkit.run.launch import home_of

FLAG = "--checkpoint"
CHECKPOINT: tuple[str, dict[str, Any]] = (
    FLAG,
    {"type": str, "help": "A run folder, its final/ or a checkpoint: the policy, and the recipe if none is given."},
)


def with_checkpoint(argv: Sequence[str]) -> list[str]:
    """Return the arguments with what the last `--checkpoint` means: its policy, and its run's recipe if none is given.

    Raises:
        RecipeError: It is given no path.
        CheckpointError: There is no policy.
    """
    _, places = _taken_apart(argv)
    if not places:
        return list(argv)
    place = places[-1]
    source = locate(place)
    if source.base is None and not os.path.isfile(Path(source.location, "config.json")):
        raise CheckpointError(f"{FLAG} is {place!r}, expected a run folder, its final/ or a checkpoint")
    lora = "null" if source.lora is None else json.dumps(asdict(source.lora))
    return [*_with_recipe(argv, [place]), f"--model.path={source.location}", f"--model.lora={lora}"]


def each_checkpoint(argv: Sequence[str]) -> dict[str, list[str]]:
    """Return the arguments for each `--checkpoint`, by its path; as they are, under "", where there is none.

    The recipe is one for all: that of the first run among them, if none is given.

    Raises:
        RecipeError: One is given no path, or is given twice.
        CheckpointError: There is no policy.
    """
    others, places = _taken_apart(argv)
    twice = [place for place in places if places.count(place) > 1]
    if twice:
        raise RecipeError(f"{FLAG} {twice[0]} is given twice, expected different ones")
    others = _with_recipe(others, places)
    return {place: with_checkpoint([*others, f"{FLAG}={place}"]) for place in places} or {"": others}


def _taken_apart(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the other arguments, and the paths of `--checkpoint`."""
    others: list[str] = []
    places: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, joined, place = word.partition("=")
        if flag != FLAG:
            others.append(word)
            continue
        place = place if joined else words.pop(0) if words else ""
        if not place or place.startswith("--"):
            raise RecipeError(f"{FLAG} has no value, expected a run folder, its final/ or a checkpoint")
        places.append(place)
    return others, places


def _with_recipe(argv: Sequence[str], places: Sequence[str]) -> list[str]:
    """Return the arguments with the recipe of the first run among the places, unless they name one."""
    named = bool(argv) and not argv[0].startswith("-") and "=" not in argv[0]
    if not named and not any(argument.partition("=")[0] == "--recipe" for argument in argv):
        homes = (home for place in places if (home := home_of(place)))
        return [word for home in homes for word in ("--recipe", str(home / "recipe.yaml"))][:2] + list(argv)
    return list(argv)

"""The folders of a verb: `--checkpoint`, from which it takes a policy and a recipe, and a new one for `--out`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rlkit.base.errors import RecipeError
from rlkit.base.files import nearby, unwritable
from rlkit.commands import with_recipe_of
from rlkit.models.source import locate
from rlkit.records.folder import home_of, make_private, output_path

FLAG = "--checkpoint"
CHECKPOINT: tuple[str, dict[str, object]] = (
    FLAG,
    {"type": str, "help": "A run folder, its final/ or a checkpoint: the policy, and the recipe if none is given."},
)


def with_checkpoint(argv: Sequence[str]) -> list[str]:
    """Return the arguments with what the last `--checkpoint` means: its policy, and its run's recipe if none is given.

    Raises:
        RecipeError: It is given no path, or one without a policy.
        CheckpointError: The checkpoint cannot be read.
    """
    _, paths = _split_arguments(argv)
    if not paths:
        return list(argv)
    path = paths[-1]
    home_of(path)  # refuses a folder that leads elsewhere
    source = locate(path)
    if source.base is None and not os.path.isfile(Path(source.location, "config.json")):
        hint = "" if os.path.exists(path) else f"; there is no such folder: {nearby(Path(path))}"
        raise RecipeError(f"{FLAG} is {path!r}, expected a run folder, its final/ or a checkpoint{hint}")
    arguments = _with_recipe(argv, [path])
    if not _names_recipe(arguments) and {"-h", "--help"}.isdisjoint(argv):
        raise RecipeError(
            f"{FLAG} is {path!r}, a model without a recipe; add the recipe by which it was trained, such as --recipe "
            "mine.yaml, or name the run instead"
        )
    lora = "null" if source.lora is None else json.dumps(asdict(source.lora))
    quantization = [] if source.quantization is None else [f"--model.quantization={source.quantization}"]
    return [*arguments, f"--model.path={source.location}", f"--model.lora={lora}", *quantization]


def each_checkpoint(argv: Sequence[str]) -> dict[str, list[str]]:
    """Return the arguments for each `--checkpoint`, by its path; as they are, under "", where there is none.

    The recipe is one for all: that of the first run among them, if none is given.

    Raises:
        RecipeError: One is given no path or one without a policy, or is given twice.
        CheckpointError: The checkpoint cannot be read.
    """
    _, paths = _split_arguments(argv)
    repeated = [path for path in paths if paths.count(path) > 1]
    if repeated:
        raise RecipeError(f"{FLAG} {repeated[0]} is given twice, expected different ones")
    other_arguments = without_checkpoint(argv)
    return {path: with_checkpoint([*other_arguments, f"{FLAG}={path}"]) for path in paths} or {"": other_arguments}


def without_checkpoint(argv: Sequence[str]) -> list[str]:
    """Return the arguments for the policy with which a run begins, without each `--checkpoint`, whose recipe stays."""
    other_arguments, paths = _split_arguments(argv)
    return _with_recipe(other_arguments, paths)


def _split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the other arguments, and the paths of `--checkpoint`."""
    other_arguments: list[str] = []
    paths: list[str] = []
    words = list(argv)
    if words and os.path.isdir(words[0]) and home_of(words[0]) is not None:
        raise RecipeError(f"{words[0]!r} is a run, expected a recipe; to use its policy, write {FLAG} {words[0]}")
    while words:
        word = words.pop(0)
        flag, joined, path = word.partition("=")
        if flag != FLAG:
            other_arguments.append(word)
            continue
        path = path if joined else words.pop(0) if words else ""
        if not path or path.startswith("--"):
            raise RecipeError(f"{FLAG} has no value, expected a run folder, its final/ or a checkpoint")
        paths.append(path)
    return other_arguments, paths


def _names_recipe(argv: Sequence[str]) -> bool:
    is_named = bool(argv) and not argv[0].startswith("-") and "=" not in argv[0]
    return is_named or any(argument.partition("=")[0] == "--recipe" for argument in argv)


def _with_recipe(argv: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Return the arguments with the recipe of the first run among the places, unless they name one."""
    if not _names_recipe(argv):
        home = next(filter(None, map(home_of, paths)), None)
        if home is not None:
            return with_recipe_of(home, argv)
    return list(argv)


def new_folder(path: str) -> Path:
    """Create a folder for `--out` that only its owner can read.

    Raises:
        RecipeError: The folder is not empty, or cannot be written.
    """
    folder = output_path(path)
    try:
        make_private(folder)
        used = any(folder.iterdir())
    except OSError as error:
        raise RecipeError(f"--out is {path!r}, which cannot be written: {unwritable(error)}") from error
    if used:
        raise RecipeError(f"--out is {path!r}, which is not empty; choose a new folder")
    return folder

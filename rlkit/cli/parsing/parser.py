"""From recipe files and options to a `Recipe`.

read (YAML as plain data) -> compose (defaults, and values checked by their types) -> instantiate -> check (relations
between options).
"""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlkit.base.errors import RecipeError
from rlkit.cli.parsing.command_line import CommandLine, OwnOptions, split
from rlkit.cli.parsing.compose import Composer, engine_in
from rlkit.cli.parsing.help import print_help
from rlkit.cli.parsing.instantiate import instantiate
from rlkit.cli.parsing.objects import plain
from rlkit.cli.parsing.reader import find, read
from rlkit.engine_choice import choose_engine, choose_precision
from rlkit.recipe import Recipe, check
from rlkit.recipe.credentials import as_yaml, expand
from rlkit.registry import Registry, load_plugins

__all__ = ["CommandLine", "Parsed", "build", "parse", "split"]


@dataclass
class Parsed:
    """A recipe, with the command line that it came from."""

    recipe: Recipe
    yaml: str
    name: str
    options: Namespace
    registry: Registry


def parse(verb: str, argv: Sequence[str], own: OwnOptions = (), *, trains: bool = False) -> Parsed:
    """Parse and check a recipe with its overrides, and build its parts.

    Args:
        verb: The verb of the command line, for messages.
        argv: The words after the verb.
        own: The verb's own options.
        trains: Whether the verb makes runs, so that recipe files may not set paths outside of the run folder.

    Raises:
        RecipeError: Something is unknown, missing, of the wrong type, or does not fit the rest.
        PluginError: A plugin is broken.
        SystemExit: Help was asked for, and has been printed.
    """
    registry = load_plugins()
    registry.require_healthy()
    for note in registry.notes:
        print(f"note: {note}", file=sys.stderr)
    line = split(argv, own)
    if line.help:
        key, name = line.help[0]
        print_help(verb, key, name, own, registry)
    if not line.recipes:
        line.problems.append(f"rlkit {verb} needs a recipe: --recipe FILE or a name (see rlkit recipe list)")
        raise RecipeError("\n".join(line.problems))
    composer = Composer(registry)
    for recipe_name in line.recipes:
        composer.add(read(find(recipe_name, registry.recipes)), by_user=not trains)
    for key, value in line.overrides:
        composer.override(key, value)
    planned = getattr(line.options, "gpu", None) is not None
    recipe, recipe_yaml = build(composer, line.problems, for_gpu=planned)
    return Parsed(recipe, recipe_yaml, _run_name(line.recipes[0]), line.options, registry)


def _run_name(recipe: str) -> str:
    """Return the run name: the recipe's, or that of the run folder that it is from, without a time."""
    path = Path(recipe)
    if path.name != "recipe.yaml":
        return path.stem
    return re.sub(r"-\d{8}-\d{6}(-\d+)?$", "", path.resolve().parent.name) or path.stem


def build(composer: Composer, problems: Sequence[str] = (), *, for_gpu: bool = False) -> tuple[Recipe, str]:
    """Return a composed recipe, its parts built and checked, and as YAML with every option filled in.

    Args:
        composer: All recipe files and options.
        problems: What was wrong before.
        for_gpu: Whether the recipe is planned for a GPU that this machine may lack; all of `GPUS` have bfloat16.

    Raises:
        RecipeError: Something is unknown, missing, of the wrong type, or does not fit the rest.
    """
    tree = composer.finish()
    if problems or composer.problems:
        raise RecipeError("\n".join((*problems, *composer.problems)))
    recipe = _instantiate(tree, composer.registry)
    if recipe.fabric.precision == "auto":
        precision = "bf16-mixed" if for_gpu else choose_precision(recipe.fabric.accelerator)
        composer.add({"fabric": {"precision": precision}})
        tree = composer.finish()
        recipe = _instantiate(tree, composer.registry)
    if engine_in(tree) is composer.default_engine:
        parts = composer.registry.parts["engines"].values()
        engine, reason = choose_engine(recipe, [part.cls for part in parts])
        if engine is not None:
            spec = {"class_path": engine.__name__, "init_args": engine.default_options}
            composer.add({"rollout": {"engine": spec}})
            tree = composer.finish()
            recipe = _instantiate(tree, composer.registry)
        recipe.rollout.engine.chosen = reason
    check(recipe)
    return recipe, as_yaml(plain(tree))


def _instantiate(tree: dict[str, object], registry: Registry) -> Recipe:
    recipe = instantiate(Recipe, expand(tree), registry)
    assert isinstance(recipe, Recipe)
    return recipe

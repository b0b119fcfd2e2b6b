"""From recipe files and options to a `Recipe`: jsonargparse, with errors that name the nearest legal thing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import (  # type: ignore[attr-defined]
    ActionConfigFile,
    ArgumentError,
    ArgumentParser,
    DefaultHelpFormatter,
    Namespace,
    lazy_instance,
    set_parsing_settings,
)
from lightning.fabric import Fabric

from rlkit.cli.suggest import explain
from rlkit.engines import TorchEngine
from rlkit.errors import RecipeError
from rlkit.ranges import in_words, resolve
from rlkit.recipe import Recipe, check
from rlkit.registry import Registry, load_plugins

ALLOWED_IMPORTS = ("lightning.fabric", "lightning.pytorch.loggers", "torch.distributed")
"""What a recipe may name besides rlkit and the loaded plugins: what `fabric:` needs."""


@dataclass
class Parsed:
    """A recipe, and what the verb needs to know of how it was given."""

    recipe: Recipe
    yaml: str
    name: str
    options: Namespace
    registry: Registry


def folder() -> Path:
    """Give the folder of the shipped recipes: in the wheel, or beside the package in a checkout."""
    package = Path(__file__).parents[1]
    return package / "recipes" if (package / "recipes").is_dir() else package.parent / "recipes"


def find(recipe: str) -> str:
    """Give the path of a recipe: a file, or the bare name of a shipped one.

    Raises:
        RecipeError: There is neither.
    """
    if Path(recipe).is_file():
        _check_yaml(Path(recipe))
        return recipe
    shipped = {path.stem: path for path in sorted(folder().glob("*.yaml"))}
    if recipe.removesuffix(".yaml") in shipped:
        return str(shipped[recipe.removesuffix(".yaml")])
    near = get_close_matches(recipe, shipped, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"shipped: {', '.join(shipped)}"
    raise RecipeError(f"--recipe is {recipe!r}, neither a file nor a shipped recipe; {hint}")


def _check_yaml(path: Path) -> None:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise RecipeError(f"{path} holds {type(content).__name__}, expected sections such as `model: {{path: tiny}}`")


class _HelpFormatter(DefaultHelpFormatter):
    """Help that says ranges in words."""

    def _get_type_str(self, action: Any) -> str | None:
        text = super()._get_type_str(action)
        return None if text is None else in_words(text)


class Parser(ArgumentParser):
    """The parser of recipes and of the parts in them."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"formatter_class": _HelpFormatter, **kwargs})


def make_parser(verb: str, registry: Registry) -> ArgumentParser:
    """Make a verb's parser: `--recipe`, and every option of the recipe; the verb adds its own."""
    set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=[*registry.packages, *ALLOWED_IMPORTS])
    for cls in (Recipe, *(part.cls for parts in registry.parts.values() for part in parts.values())):
        resolve(cls)
    parser = Parser(prog=f"rlkit {verb}", exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--recipe", action=ActionConfigFile, help="A file, or a shipped recipe's name; several stack.")
    parser.add_class_arguments(Recipe, as_group=False, skip={"fabric"})
    parser.add_class_arguments(Fabric, "fabric", instantiate=False)
    parser.set_defaults({"rollout.engine": lazy_instance(TorchEngine)})
    return parser


def parse(verb: str, argv: Sequence[str], own: Sequence[tuple[str, dict[str, Any]]] = ()) -> Parsed:
    """Parse and check a recipe with its overrides, and build its parts.

    Args:
        verb: For the usage text.
        argv: What follows the verb.
        own: The verb's own options, as (flag, keywords of `add_argument`).

    Raises:
        RecipeError: Something is unknown, missing, of the wrong type, or does not fit the rest.
        PluginError: A plugin is broken.
    """
    registry = load_plugins()
    registry.require_healthy()
    parser = make_parser(verb, registry)
    for flag, keywords in own:
        parser.add_argument(flag, **keywords)
    recipes, ordered = hoist(argv)
    if not recipes and not {"-h", "--help"} & set(argv) and not any(".help" in a for a in argv):
        raise RecipeError(f"rlkit {verb} needs a recipe: --recipe FILE or a shipped one's name (see rlkit recipe list)")
    try:
        namespace = parser.parse_args(ordered)
        plain = namespace.clone(with_meta=False)
        for flag, _ in own:
            plain.pop(flag.lstrip("-"), None)
        resolved = parser.dump(plain, skip_unset=False)  # a null whose default is something else must stay
        built = parser.instantiate(namespace)
    except ArgumentError as error:
        raise RecipeError(explain(str(error), parser, registry)) from error
    sections = {f.name: getattr(built, f.name) for f in fields(Recipe) if f.name != "fabric"}
    fabric = {key: value for key, value in vars(built.fabric).items() if value is not None}
    recipe = Recipe(**sections, fabric=fabric)
    check(recipe)
    return Parsed(recipe, resolved, Path(recipes[0]).stem if recipes else verb, built, registry)


def hoist(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Put all `--recipe` before everything else, so that overrides win wherever they stand.

    Returns:
        The recipes' paths, and the arguments in the new order.
    """
    recipes: list[str] = []
    rest: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        if argument == "--recipe":
            value = next(arguments, None)
            if value is None:
                raise RecipeError("--recipe was given nothing, expected a file or a shipped recipe's name")
            recipes.append(find(value))
        elif argument.startswith("--recipe="):
            recipes.append(find(argument.partition("=")[2]))
        else:
            rest.append(argument)
    return recipes, [f"--recipe={path}" for path in recipes] + rest

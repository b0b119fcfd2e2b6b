"""What a verb of the command line begins with: from its words to a `Recipe`, and to its own options.

read (YAML as plain data) -> compose (defaults, and values checked by their types) -> build -> check (relations between
options). `rlkit docs plugins/command` has a verb to begin with; its pyproject.toml names the function:

    [project.entry-points."rlkit.commands"]
    hello = "rlkit_hello.commands:run"
"""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from rlkit.base.errors import RecipeError
from rlkit.recipe import Recipe
from rlkit.recipe.parsing.compose import Composer, missing, plain_data
from rlkit.recipe.parsing.foreign import FOREIGN, JSONARGPARSE, NO_OPTION
from rlkit.recipe.parsing.help import ALL, OwnOptions, print_help
from rlkit.recipe.parsing.reader import find_recipe
from rlkit.recipe.parsing.references import refuse_references
from rlkit.recipe.schema import options
from rlkit.recipe.trust import risk
from rlkit.registry import Registry, load_plugins
from rlkit.run.build import build

ALLOW_CODE: tuple[str, dict[str, object]] = (
    "--allow-code",
    {"action": "store_true", "help": "Trust a run folder's recipe: run its code, and send samples to its addresses."},
)
"""A verb's option: that of verbs which take the recipe of a run folder."""

_UNDECODED = (
    f"holds bytes that are not {sys.getfilesystemencoding().upper()}, the encoding of this locale, expected text "
    "(LC_ALL=C.UTF-8 sets UTF-8)"
)
_SURROGATE = re.compile("[\ud800-\udfff]")
"""What stands for a byte that the locale's encoding cannot decode."""


@dataclass
class CommandLine:
    """The words after a verb, by what they mean.

    Args:
        recipes: Recipes, to be stacked.
        options: The values of the verb's own options.
        overrides: Options of the recipe, as (key, text).
        help: Keys whose help is asked for, each with a class's name if there is one; the empty key is the overview,
            `ALL` every option.
        problems: Words that mean nothing.
    """

    recipes: list[str] = field(default_factory=list)
    options: Namespace = field(default_factory=Namespace)
    overrides: list[tuple[str, str]] = field(default_factory=list)
    help: list[tuple[str, str | None]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class Parsed:
    """A recipe, with the command line that it came from."""

    recipe: Recipe
    yaml: str
    """Its text, with every option filled in."""
    name: str
    line: CommandLine
    registry: Registry

    @property
    def options(self) -> Namespace:
        """The values of the verb's own options."""
        return self.line.options


def split(argv: Sequence[str], own: OwnOptions = ()) -> CommandLine:
    """Split a command line; overrides win wherever they stand, and a first word without dashes is a recipe."""
    line, keywords_of = CommandLine(), dict(own)
    own_values = {flag: False if _is_switch(keywords) else keywords.get("default") for flag, keywords in own}
    words = list(argv)
    if words and not words[0].startswith("-") and "=" not in words[0]:
        line.recipes.append(words.pop(0))
    while words:
        word = words.pop(0)
        flag, equals, text = word.partition("=")
        if _SURROGATE.search(word):
            line.problems.append(f"{flag!a} {_UNDECODED}")
        elif word in ("-h", "--help"):
            key = words.pop(0) if words and not words[0].startswith("-") else ""
            line.help.append((key, None))
        elif word == "--help-all":
            line.help.append((ALL, None))
        elif not word.startswith("--") or flag == "--":
            remedy = f": write --{word.lstrip('-')}"
            if not equals:
                remedy = f"; a recipe is given by --recipe {word}, a value after its option"
            line.problems.append(f"{word!r} is no option{remedy}")
        elif _is_switch(keywords_of.get(flag, {})) and not equals:
            own_values[flag] = True
        else:
            value = text if equals else words.pop(0) if words and not words[0].startswith("--") else None
            _set_flag(line, own_values, flag, value, keywords_of.get(flag, {}))
    line.options = Namespace(**{flag[2:].replace("-", "_"): value for flag, value in own_values.items()})
    return line


def _is_switch(keywords: Mapping[str, object]) -> bool:
    return keywords.get("action") == "store_true"


def _set_flag(
    line: CommandLine, own_values: dict[str, object], flag: str, value: str | None, keywords: Mapping[str, object]
) -> None:
    """Note the value of a flag: one of the verb's own options, a recipe, a request for help, or an override."""
    key = flag.removeprefix("--")
    meant = _nearest_flag(flag, [*own_values, "--recipe"])
    if flag.endswith(".help"):
        line.help.append((key.removesuffix(".help"), value))
    elif _is_switch(keywords):
        line.problems.append(f"{flag} takes no value; write {flag} alone, or leave it out")
    elif flag in JSONARGPARSE:
        line.problems.append(f"{flag} is not an option of rlkit: {JSONARGPARSE[flag]}")
    elif meant not in (None, flag):
        line.problems.append(f"unknown option {flag!r}; did you mean {meant!r}?")
    elif value is not None and _SURROGATE.search(value):
        line.problems.append(f"{flag!a} {_UNDECODED}")
    elif value is None and key.rpartition(".")[2] in (*FOREIGN, *NO_OPTION):
        line.overrides.append((key, "true"))  # a switch of another toolkit, which is then named
    elif value is None:
        line.problems.append(f"{flag} has no value; write {flag}=VALUE. {keywords.get('help', '')}".rstrip(" ."))
    elif flag == "--recipe":
        line.recipes.append(value)
    elif keywords.get("action") == "append":
        former = own_values[flag]
        own_values[flag] = [*(former if isinstance(former, list) else ()), value]
    elif flag in own_values:
        own_values[flag] = value
    else:
        line.overrides.append((key, value))


def _nearest_flag(flag: str, own_flags: Sequence[str]) -> str | None:
    """Return the most similar of a verb's own options; None if one of recipes is as similar, or none is."""
    near = get_close_matches(flag, [*own_flags, *(f"--{name}" for name in options(Recipe))], 1, 0.7)
    is_of_recipe = "." in flag or flag.removeprefix("--") in (*FOREIGN, *NO_OPTION)
    return near[0] if near and near[0] in own_flags and not is_of_recipe else None


def parse(
    verb: str,
    argv: Sequence[str],
    own: OwnOptions = (),
    *,
    trains: bool = False,
    needs_files: bool = False,
    run_of: Callable[[Namespace], Path | None] | None = None,
) -> Parsed:
    """Parse and check a recipe with its overrides, and build its parts.

    Args:
        verb: The verb of the command line, for messages.
        argv: The words after the verb.
        own: The verb's own options. With a value of `--gpu` among them, the recipe is planned for a GPU that this
            machine may lack.
        trains: Whether the verb makes runs, so that recipe files may not set paths outside of the run folder.
        needs_files: Whether all files that a run reads must be there.
        run_of: Returns the run folder whose recipe is taken if none is given, by the verb's own options, of which
            `ALLOW_CODE` is one.

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
    home = None if line.recipes or run_of is None else run_of(line.options)
    if home is not None:
        line.recipes.append(_recipe_in(home, line.options.allow_code))
    if not line.recipes:
        needed = f"rlkit {verb} needs a recipe: --recipe FILE or a name (see rlkit recipe list)"
        raise RecipeError("\n".join(line.problems) or needed)
    composer = Composer(registry, needs_files)
    composer.problems.extend(line.problems)
    for recipe_name in line.recipes:
        composer.add_file(find_recipe(recipe_name, registry.recipes), by_user=not trains)
    for key, value in line.overrides:
        composer.add({key: value})
    planned = getattr(line.options, "gpu", None) is not None
    recipe, recipe_yaml = build(composer, for_gpu=planned)
    return Parsed(recipe, recipe_yaml, _run_name(line.recipes[0]), line, registry)


def _run_name(recipe: str) -> str:
    """Return the run name: the recipe's, or that of the run folder that it is from, without a time."""
    path = Path(recipe)
    if path.name != "recipe.yaml":
        return path.stem
    return re.sub(r"-\d{8}-\d{6}(-\d+)?$", "", path.resolve().parent.name) or path.stem


def with_recipe_of(home: Path, argv: Sequence[str]) -> list[str]:
    """Return the arguments with the recipe of a run folder, which may be a stranger's.

    Raises:
        RecipeError: The recipe runs code or names an address, and the user has not said that they trust it.
    """
    return ["--recipe", _recipe_in(home, ALLOW_CODE[0] in argv), *argv]


def _recipe_in(home: Path, allows_code: bool) -> str:
    path = home / "recipe.yaml"
    composer = Composer(load_plugins())
    composer.add_file(path)  # a part may be written as text
    refuse_references(composer.tree, home)
    if not allows_code:
        reason = risk(plain_data(composer.tree))
        if reason is not None:
            raise RecipeError(
                f"{path} has {reason}; rlkit asks for every run folder, as it may be a stranger's: if you trust it, "
                f"add {ALLOW_CODE[0]}, or name it yourself: --recipe {path}"
            )
    return str(path)


def parse_part(key: str, overrides: Sequence[tuple[str, str]]) -> object:
    """Return the part of one key as the data of a recipe, its options checked as a recipe's are.

    Args:
        key: That of a recipe, such as `reward`.
        overrides: The key with the name of a class, then its options, as (dotted key, text).

    Raises:
        RecipeError: There is no such part, or an option is unknown, missing or of the wrong type.
    """
    composer = Composer(load_plugins())
    for name, text in overrides:
        composer.add({name: text})
    node = composer.tree.get(key)
    if not composer.problems:
        hint = options(Recipe)[key].hint
        composer.problems.extend(problem for _, problem in missing(key, hint, node, composer.registry))
    if composer.problems:
        raise RecipeError("\n".join(composer.problems))
    return plain_data(node)

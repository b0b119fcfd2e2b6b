"""From recipe files and options to a `Recipe`: composed and checked as plain data, then built by jsonargparse."""

from __future__ import annotations

import inspect
import sys
from argparse import SUPPRESS
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace, _common, set_parsing_settings

from rlkit.cli.parsing import suggest
from rlkit.cli.parsing.compose import Composer
from rlkit.cli.parsing.credentials import expand, withhold
from rlkit.cli.parsing.objects import without_objects
from rlkit.cli.parsing.reader import find, read
from rlkit.cli.parsing.schema import Choice, import_paths, reachable
from rlkit.errors import RecipeError, RlkitError, explain
from rlkit.ranges import in_words, resolve
from rlkit.recipe import Recipe, check
from rlkit.registry import Registry, load_plugins

__all__ = ["Parsed", "make_parser", "parse", "split"]

Own = Sequence[tuple[str, dict[str, Any]]]
"""A verb's own options, as (flag, keywords of `add_argument`)."""


@dataclass
class Parsed:
    """A recipe, with the command line that it came from."""

    recipe: Recipe
    yaml: str
    name: str
    options: Namespace
    registry: Registry


@dataclass
class Given:
    """A command line, taken apart."""

    recipes: list[str] = field(default_factory=list)
    options: Namespace = field(default_factory=Namespace)
    overrides: list[tuple[str, str]] = field(default_factory=list)
    help: list[tuple[str, str | None]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def parse(verb: str, argv: Sequence[str], own: Own = (), *, trains: bool = False) -> Parsed:
    """Parse and check a recipe with its overrides, and build its parts.

    Args:
        verb: For messages.
        argv: What follows the verb.
        own: The verb's own options.
        trains: The verb makes runs, so that recipe files may not set where these write outside of the run folder.

    Raises:
        RecipeError: Something is unknown, missing, of the wrong type, or does not fit the rest.
        PluginError: A plugin is broken.
        SystemExit: Help was asked for, and has been printed.
    """
    registry = load_plugins()
    registry.require_healthy()
    for note in registry.notes:
        print(f"note: {note}", file=sys.stderr)
    given = split(argv, own)
    if given.help:
        _print_help(verb, given, own, registry)
    if not given.recipes:
        given.problems.append(f"rlkit {verb} needs a recipe: --recipe FILE or a name (see rlkit recipe list)")
        raise RecipeError("\n".join(given.problems))
    composer = Composer(registry)
    for recipe in given.recipes:
        composer.add(read(find(recipe, registry.recipes)), by_user=not trains)
    for key, value in given.overrides:
        composer.override(key, value)
    built, whole = build(verb, composer, registry, given.problems)
    return Parsed(built, whole, Path(given.recipes[0]).stem, given.options, registry)


@contextmanager
def settings_restored() -> Iterator[None]:
    """Leave jsonargparse's settings, which are the process's, as they were: it has no way to remove import paths."""
    before = dict(_common.parsing_settings)
    try:
        yield
    finally:
        _common.parsing_settings.clear()
        _common.parsing_settings.update(before)


@settings_restored()
def build(verb: str, composer: Composer, registry: Registry, problems: Sequence[str] = ()) -> tuple[Recipe, str]:
    """Return a composed recipe, checked and its parts built, and as YAML with every option filled in.

    Args:
        verb: For messages.
        composer: Has all recipes and options.
        registry: The parts that can be named.
        problems: What was wrong before.

    Raises:
        RecipeError: Something is unknown, missing, of the wrong type, or does not fit the rest.
    """
    tree = composer.finish()
    if found := [*problems, *composer.problems]:
        raise RecipeError("\n".join(found))
    parser = make_parser(verb, registry)
    try:
        namespace = parser.parse_object(tree, env=False)
        # a null whose default is something else must stay
        whole = parser.dump(without_objects(namespace.clone()), skip_unset=False, skip_validation=True)
        built = parser.instantiate(expand(namespace))
    except Exception as error:  # whatever a constructor raises
        raise RecipeError(_reason(error)) from error
    recipe = Recipe(**{f.name: getattr(built, f.name) for f in fields(Recipe)})
    check(recipe)
    return recipe, withhold(whole)


def _reason(error: BaseException) -> str:
    """Return what a part's constructor raised: jsonargparse wraps it where the part is optional."""
    while not isinstance(error, RlkitError) and error.__cause__ is not None:
        error = error.__cause__
    return str(error) if isinstance(error, RlkitError) else f"the recipe cannot be built: {explain(error)}"


class _HelpFormatter(DefaultHelpFormatter):
    """Help with ranges in words, and with paragraphs."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(super(_HelpFormatter, self)._fill_text(part, width, indent) for part in text.split("\n\n"))

    def _get_type_str(self, action: Any) -> str | None:
        text = super()._get_type_str(action)
        return None if text is None else in_words(text)


class Parser(ArgumentParser):
    """The parser of recipes and of the parts in them."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"formatter_class": _HelpFormatter, **kwargs})


def make_parser(verb: str, registry: Registry) -> ArgumentParser:
    """Return the parser of all options of a recipe; values may name registered parts, and no other import path."""
    classes = reachable(Recipe, registry)
    paths = {path for cls in classes for path in (*import_paths(cls), _home(cls))}
    for cls in classes:
        resolve(cls)
    set_parsing_settings(
        import_path_denylist=["*"],
        import_path_allowlist=sorted(paths),
        instantiate_subclass_spec_in_any=False,
    )
    parser = Parser(prog=f"rlkit {verb}", exit_on_error=False, allow_abbrev=False, default_env=False)
    parser.add_class_arguments(Recipe, as_group=False)
    return parser


def _home(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def split(argv: Sequence[str], own: Own = ()) -> Given:
    """Split a command line: recipes, the verb's own options, and overrides, which win wherever they stand.

    A first word without dashes is a recipe.
    """
    given, kinds = Given(), dict(own)
    for flag, keywords in own:
        default = False if keywords.get("action") == "store_true" else keywords.get("default")
        setattr(given.options, _dest(flag), default)
    words = list(argv)
    if words and not words[0].startswith("-") and "=" not in words[0]:
        given.recipes.append(words.pop(0))
    while words:
        word = words.pop(0)
        flag, equals, text = word.partition("=")
        if not _decoded(word):
            given.problems.append(f"{flag!a} {_UNDECODED}")
        elif word in ("-h", "--help"):
            given.help.append(("", None))
        elif not word.startswith("--") or flag == "--":
            given.problems.append(_stray(word))
        elif kinds.get(flag, {}).get("action") == "store_true" and not equals:
            setattr(given.options, _dest(flag), True)
        else:
            value = text if equals else words.pop(0) if words and not words[0].startswith("--") else None
            _take(given, flag, value, kinds)
    return given


_UNDECODED = (
    f"holds bytes that are not {sys.getfilesystemencoding().upper()}, the encoding of this locale, expected text "
    "(LC_ALL=C.UTF-8 sets UTF-8)"
)


def _decoded(word: str) -> bool:
    """Return whether a word is free of what Python puts for bytes that the locale's encoding cannot decode."""
    return not any("\ud800" <= letter <= "\udfff" for letter in word)


def _take(given: Given, flag: str, value: str | None, own: dict[str, dict[str, Any]]) -> None:
    """Note a flag and its value."""
    if flag.endswith(".help"):
        given.help.append((flag.removeprefix("--").removesuffix(".help"), value))
    elif value is not None and not _decoded(value):
        given.problems.append(f"{flag!a} {_UNDECODED}")
    elif value is None:
        given.problems.append(f"{flag} has no value; write {flag}=VALUE")
    elif flag == "--recipe":
        given.recipes.append(value)
    elif own.get(flag, {}).get("action") == "append":
        setattr(given.options, _dest(flag), [*(getattr(given.options, _dest(flag)) or ()), value])
    elif flag in own:
        setattr(given.options, _dest(flag), value)
    else:
        given.overrides.append((flag.removeprefix("--"), value))


def _dest(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _stray(word: str) -> str:
    """Explain a word that belongs to no option."""
    if "=" in word:
        return f"{word!r} is no option: write --{word.lstrip('-')}"
    return f"{word!r} is no option; a recipe is given by --recipe {word}, a value after its option"


@settings_restored()
def _print_help(verb: str, given: Given, own: Own, registry: Registry) -> NoReturn:
    """Print the help that was asked for: all options, or those of a class or section.

    Raises:
        SystemExit: It is printed.
        RecipeError: The class is none that its key may name.
    """
    key, name = given.help[0]
    cls = _class_for_help(key, name, registry) if key else Recipe
    parser = make_parser(verb, registry)
    if key:
        body = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[2].partition("Args:\n")[0].strip()
        description = f"{key}: {cls.__name__}\n\n{body}".strip()  # the docstring's first line stands above the options
        parser = Parser(prog=f"rlkit {verb}", description=description, add_help=False)
        parser.add_class_arguments(cls, key)
    else:
        parser.add_argument(
            "--recipe",
            help="A file, or a name of `rlkit recipe list`; several stack, the last wins.",
        )
        for flag, keywords in own:
            parser.add_argument(flag, **keywords)
    for action in parser._actions:
        action.required = action.required and bool(key)  # a recipe sets what the run needs
        if action.help == "Path to a configuration file.":  # which jsonargparse would read, and rlkit does not
            action.help = SUPPRESS
    parser.print_help()
    raise SystemExit(0)


def _class_for_help(key: str, name: str | None, registry: Registry) -> type:
    found = suggest.classes_at(key, registry)
    if found is None:
        raise RecipeError(f"--{key}.help: {key!r} names no class and is no section; see rlkit fit --help")
    if not isinstance(found, Choice):
        return found.cls
    if name is None:
        listed = ", ".join(found.parts) or "none is installed"
        raise RecipeError(f"--{key}.help names no class, expected one of: {listed}")
    part = found.find(name)
    if part is None:
        raise RecipeError(suggest.unknown_class(f"{key}.help", name, found, registry))
    return part.cls

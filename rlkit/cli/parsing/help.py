"""`--help` and `--KEY.help`: the options of a recipe, of a section or of a part, read from their signatures."""

from __future__ import annotations

import inspect
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from textwrap import fill
from typing import NoReturn

from rlkit.base.errors import RecipeError
from rlkit.cli.parsing import suggest
from rlkit.cli.parsing.command_line import OwnOptions
from rlkit.cli.parsing.schema import Choice, Section, descriptions, options, shape, summary
from rlkit.cli.parsing.values import describe
from rlkit.hooks import KINDS
from rlkit.recipe import Recipe
from rlkit.registry import Registry

WIDTH = 80
"""Columns of a description."""


def print_help(verb: str, key: str, name: str | None, own: OwnOptions, registry: Registry) -> NoReturn:
    """Print the options of a recipe, or those of a class or section.

    Args:
        verb: The verb of the command line.
        key: The key of the section or part; empty for the recipe.
        name: The name of the part's class, if there is one.
        own: The verb's own options.
        registry: The parts that can be named.

    Raises:
        SystemExit: The help is printed.
        RecipeError: The key is no section and names no part, or the class is none that it may name.
    """
    parser = ArgumentParser(f"rlkit {verb}", add_help=False, formatter_class=RawDescriptionHelpFormatter)
    parser.usage = f"rlkit {verb} --recipe NAME [--OPTION VALUE ...]"
    if key:
        cls = _class_at(key, name, registry)
        paragraphs = inspect.cleandoc(cls.__doc__ or "").partition("Args:\n")[0].strip().split("\n\n")
        parser.description = "\n\n".join(fill(text, WIDTH) for text in (f"{key}: {cls.__name__}", *paragraphs))
        _add_options(parser, cls, f"{key}.", registry, asks=True)
    else:
        parser.epilog = "--KEY.help shows the options of a section, --KEY.help CLASS those of a class."
        parser.add_argument("-h", "--help", action="help", help="Show this help message and exit.")
        parser.add_argument("--recipe", help="A file, or a name of `rlkit recipe list`; several stack, the last wins.")
        for flag, keywords in own:
            parser.add_argument(flag, **keywords)  # type: ignore[arg-type]
        _add_options(parser, Recipe, "", registry, asks=False)
    parser.print_help()
    raise SystemExit(0)


def _add_options(parser: ArgumentParser, cls: type, prefix: str, registry: Registry, asks: bool) -> None:
    """Add the options of a class, and those of the sections in it that are always present.

    Args:
        parser: The parser that prints them.
        cls: A section or a part.
        prefix: The beginning of their keys.
        registry: The parts that can be named.
        asks: Whether required options are marked; a recipe sets those of a run.
    """
    texts = descriptions(cls)
    for name, option in options(cls).items():
        key = f"{prefix}{name}"
        allowed = shape(option.hint, registry)
        structure = allowed.structure
        if isinstance(structure, Section) and not allowed.optional and allowed.plain is None:
            _add_options(parser, structure.cls, f"{key}.", registry, asks)
            continue
        text = texts.get(name, "")
        if isinstance(structure, Section | Choice) and not text:
            text = summary(structure.cls if isinstance(structure, Section) else KINDS[structure.kind].interface)
        facts = [f"type: {describe(option.hint, registry)}"]
        if not option.required:
            facts.append(f"default: {_as_text(option.default)}")
        elif asks:
            facts.append("required")
        parser.add_argument(
            f"--{key}", metavar=name.upper(), help=f"{text} ({'; '.join(facts)})".strip().replace("%", "%%")
        )


def _as_text(default: object) -> str:
    if default is None or isinstance(default, bool):
        return suggest.YAML[default]
    is_plain = isinstance(default, int | float | str | list | tuple | dict)
    return str(default) if is_plain else type(default).__name__


def _class_at(key: str, name: str | None, registry: Registry) -> type:
    """Return the class whose options are asked for.

    Raises:
        RecipeError: The key is no section and names no part, or the class is none that it may name.
    """
    structure = suggest.classes_at(key, registry)
    if structure is None:
        raise RecipeError(f"--{key}.help: {key!r} names no class and is no section; see rlkit fit --help")
    if not isinstance(structure, Choice):
        return structure.cls
    if name is None:
        listed = ", ".join(structure.parts) or "none is installed"
        raise RecipeError(f"--{key}.help names no class, expected one of: {listed}")
    part = structure.find(name)
    if part is None:
        raise RecipeError(suggest.unknown_class(f"{key}.help", name, structure, registry))
    return part.cls

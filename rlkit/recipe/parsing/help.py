"""`--help`, `--help KEY` and `--help-all`: the options of a recipe, a section or a part, read from their signatures."""

from __future__ import annotations

import inspect
import shutil
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from textwrap import fill
from typing import NoReturn

from rlkit.base.errors import RecipeError
from rlkit.hooks import KINDS
from rlkit.recipe import Recipe
from rlkit.recipe.parsing import suggest
from rlkit.recipe.schema import Choice, DictOf, ListOf, Section, Structure, descriptions, options, shape, summary
from rlkit.registry import Registry

ALL = "all"
"""The key of `--help-all`."""
OwnOptions = Sequence[tuple[str, Mapping[str, object]]]
"""A verb's own options, as (flag, keywords of `add_argument`)."""
WIDTH = 80
"""Columns of a description."""
FIRST = ("model.path", "task", "reward", "train.steps", "train.lr", "rollout.group_size", "fabric.devices")
"""The options that most runs set."""
SECTIONS = {
    "models": ("model", "critic", "reference", "teacher"),
    "data": ("task", "curriculum", "mix"),
    "rollouts": ("rollout", "tools", "parser", "interaction", "environment", "agent", "conversation"),
    "rewards": ("reward", "shaping", "kl_reward"),
    "algorithm": ("advantage", "loss", "kl_loss", "correction", "rejection"),
    "run": ("train", "validation", "save", "log", "callbacks", "profile", "fabric", "launcher", "placement"),
}
"""The sections of a recipe, by topic."""
RECIPE = "A file, or a name of `rlkit recipe list`; several stack, the last wins."
NAME_COLUMNS = 24
"""Columns of the names in the overview."""
LONGEST_LINE = 110
"""Columns of the overview on a wider terminal."""


def print_help(verb: str, key: str, name: str | None, own: OwnOptions, registry: Registry) -> NoReturn:
    """Print an overview, all options of a recipe, or those of a class or section.

    Args:
        verb: The verb of the command line.
        key: The key of the section or part; empty for the overview, `ALL` for every option of a recipe.
        name: The name of the part's class, if there is one.
        own: The verb's own options.
        registry: The parts that can be named.

    Raises:
        SystemExit: The help is printed.
        RecipeError: The key is no section and names no part, or the class is none that it may name.
    """
    if not key:
        print("\n".join(_overview(verb, own, registry)))
        raise SystemExit(0)
    parser = ArgumentParser(f"rlkit {verb}", add_help=False, formatter_class=RawDescriptionHelpFormatter)
    parser.usage = f"rlkit {verb} --recipe NAME [--OPTION VALUE ...]"
    if key != ALL:
        cls = _class_at(key, name, registry)
        paragraphs = inspect.cleandoc(cls.__doc__ or "").partition("Args:\n")[0].strip().split("\n\n")
        parser.description = "\n\n".join(fill(text, WIDTH) for text in (f"{key}: {cls.__name__}", *paragraphs))
        _add_options(parser, cls, f"{key}.", registry, asks=True)
    else:
        parser.epilog = "--KEY.help shows the options of a section, --KEY.help CLASS those of a class."
        parser.add_argument("--recipe", help=RECIPE)
        for flag, keywords in own:
            parser.add_argument(flag, **keywords)  # type: ignore[arg-type]
        _add_options(parser, Recipe, "", registry, asks=False)
    parser.print_help()
    raise SystemExit(0)


def _overview(verb: str, own: OwnOptions, registry: Registry) -> Iterator[str]:
    """Yield the lines of `--help`: the verb's options, the recipe's most used options, and its sections."""
    columns = min(shutil.get_terminal_size().columns, LONGEST_LINE)

    def entry(name: str, text: object) -> str:
        indent = " " * (NAME_COLUMNS + 2)
        return fill(f"  {name:<{NAME_COLUMNS}}{text}", max(columns, 60), subsequent_indent=indent)

    yield f"usage: rlkit {verb} --recipe NAME [--OPTION VALUE ...]\n"
    yield entry("--recipe NAME", RECIPE)
    for flag, keywords in own:
        value = "" if keywords.get("action") == "store_true" else f" {flag.rpartition('-')[2].upper()}"
        yield entry(flag + value, keywords.get("help", ""))
    yield "\noptions of the recipe that most runs set:"
    sections = options(Recipe)
    for key in FIRST:
        section, _, name = key.partition(".")
        structure = shape(sections[section].hint, registry).structure
        if isinstance(structure, Section):
            yield entry(f"--{key}", descriptions(structure.cls)[name])
        elif isinstance(structure, Choice):
            yield entry(f"--{key}", f"One of {', '.join(structure.parts)}.")
    yield "\nsections of the recipe:"
    for topic, names in SECTIONS.items():
        yield entry(topic, ", ".join(names))
    yield f"""
rlkit {verb} --help SECTION      the options of a section, such as train
rlkit {verb} --loss.help DPO     the options of a class, here of a loss
rlkit {verb} --help-all          every option"""


def _summary_of(structure: Structure | None, registry: Registry) -> str:
    """Return the purpose of a section or a part, in one sentence."""
    while isinstance(structure, DictOf | ListOf):
        structure = shape(structure.hint, registry).structure
    if isinstance(structure, Choice):
        return summary(KINDS[structure.kind].interface)
    return "" if structure is None else summary(structure.cls)


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
            text = _summary_of(structure, registry)
        facts = [f"type: {suggest.describe(option.hint, registry)}"]
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
    if structure is None and "." not in key:
        raise RecipeError(f"unknown section {key!r}; {suggest.nearest(key, [*options(Recipe)])}")
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

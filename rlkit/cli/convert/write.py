"""A conversion as a recipe in YAML: each option with what it came from, and after it what was not carried over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import yaml

from rlkit.cli.convert.table import Conversion
from rlkit.cli.parsing.compose import Composer
from rlkit.cli.parsing.parser import build
from rlkit.cli.parsing.reader import load
from rlkit.errors import RecipeError, shorten, show
from rlkit.recipe import Recipe
from rlkit.registry import Registry
from rlkit.text import HIDDEN, SECRET_NAME, safe

SECTIONS = tuple(Recipe.__dataclass_fields__)
CLASS = ""
"""The name, in a node of the tree, of the class that its other options belong to."""

Tree = dict[str, "Tree | tuple[object, str]"]


def recipe_text(found: Conversion) -> str:
    """Return the recipe in YAML; the comment after an option names the peer's."""
    tree: Tree = {}
    for key, (value, source) in sorted(found.recipe.items(), key=lambda item: _place(item[0])):
        node = tree
        *outer, last = key.split(".")
        for name in outer:
            inner = node.setdefault(name, {})
            if isinstance(inner, tuple):  # a class's name
                inner = node[name] = {CLASS: inner}
            node = inner
        node[last] = (value, source)
    return "\n".join(_lines(tree, "")) + "\n"


def _place(key: str) -> tuple[int, int]:
    """Return the order of options: as sections stand in a recipe, a class before its options."""
    name = key.partition(".")[0]
    return SECTIONS.index(name) if name in SECTIONS else len(SECTIONS), key.count(".")


def _lines(tree: Tree, indent: str) -> Iterator[str]:
    for name, node in tree.items():
        if isinstance(node, tuple):
            yield f"{indent}{name}: {_scalar(node[0])}{_comment(node[1])}"
            continue
        yield f"{indent}{name}:"
        cls = node.get(CLASS)
        if isinstance(cls, tuple):
            yield f"{indent}  class_path: {_scalar(cls[0])}{_comment(cls[1])}"
            yield f"{indent}  init_args:"
            yield from _lines({key: value for key, value in node.items() if key != CLASS}, f"{indent}    ")
        else:
            yield from _lines(node, f"{indent}  ")


def _scalar(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**9, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _comment(text: str) -> str:
    return f"  # {one_line(text)}" if text else ""


def one_line(text: str) -> str:
    """Return a text as part of a comment: one line, without control codes or credentials."""
    return " ".join(shorten(safe(text), 400).split())


def left_out(found: Conversion) -> list[str]:
    """Return a line for each option that is not carried over as it is, and what to do about it."""
    lines = []
    for key, remedy in found.notes.items():
        value = f"={show(found.given.values[key], 60)}" if key in found.given.values else ""
        value = f"={HIDDEN}" if value and SECRET_NAME.search(key) else value
        lines.append(one_line(f"{key}{value}: {remedy}"))
    return lines


def problems(text: str, registry: Registry) -> list[str]:
    """Return what rlkit itself says of a recipe's text: what is missing, and what does not fit."""
    content = load(text)
    composer = Composer(registry)
    composer.add({str(key): value for key, value in content.items()} if isinstance(content, Mapping) else {})
    try:
        build(composer)
    except RecipeError as error:
        return [one_line(line) for line in str(error).splitlines()]
    return []

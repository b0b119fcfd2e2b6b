"""The text of a conversion: a recipe in YAML with the source of each option, and remarks on the other options."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from rlkit.base.errors import RlkitError, shorten, show
from rlkit.base.text import redact_option, safe
from rlkit.commands import parse
from rlkit.recipe import Recipe
from rlkit_convert.conversion import Conversion

SECTIONS = tuple(field.name for field in fields(Recipe))
HEAD_LINES = "#\n"
"""As many lines as are printed above a recipe, so that problems name the lines of what is printed."""
CLASS = ""
"""The key, in a node of the tree, of the class that the node's options belong to."""

Leaf = tuple[object, str]
"""An option's value and its source."""
Tree = dict[str, "Tree | Leaf"]


def recipe_text(conversion: Conversion) -> str:
    """Return the recipe in YAML; the comment after an option names the peer's option."""
    tree: Tree = {}
    for key, (value, source) in sorted(conversion.recipe.items(), key=lambda option: _rank(option[0])):
        node = tree
        *parents, last = key.split(".")
        for parent in parents:
            child = node.setdefault(parent, {})
            if isinstance(child, tuple):  # the name of a class, whose options follow
                child = {CLASS: child}
                node[parent] = child
            node = child
        node[last] = (value, ", ".join(map(conversion.options.name, source.split(", "))))
    return "\n".join(_lines(tree, "")) + "\n"


def _rank(key: str) -> tuple[int, int]:
    """Return the sort key of an option: sections in a recipe's order, a class before its options."""
    section = key.partition(".")[0]
    return SECTIONS.index(section) if section in SECTIONS else len(SECTIONS), key.count(".")


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
            yield from _lines({key: child for key, child in node.items() if key != CLASS}, f"{indent}    ")
        else:
            yield from _lines(node, f"{indent}  ")


def _scalar(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**9, sort_keys=False)
    text = text.removesuffix("\n").removesuffix("\n...")
    return json.dumps(value, ensure_ascii=False, default=str) if "\n" in text else text  # on one line


def _comment(text: str) -> str:
    return f"  # {one_line(text)}" if text else ""


def one_line(text: str) -> str:
    """Return a text on one line, without control codes or credentials, for use in a comment."""
    return " ".join(shorten(safe(text), 400).split())


def remark(conversion: Conversion, key: str) -> str:
    """Return the line about an option, with its value."""
    value = ""
    if key in conversion.options.values:
        value = f"={redact_option(key, show(conversion.options.values[key], 60))}"
    return one_line(f"{conversion.options.name(key)}{value}: {conversion.notes[key]}")


def recipe_problems(text: str) -> list[str]:
    """List the needs of a recipe before it runs: code that its user allows, missing options and wrong values."""
    code = [
        f"{part} runs {show(function)}: read it, then set allow_code: true beside it"
        for part, function in _functions(yaml.safe_load(text))
    ]
    return [*map(one_line, code), *(line for line in _parse_problems(text) if "allow_code" not in line)]


def _functions(node: object) -> Iterator[tuple[object, object]]:
    """Yield the class and the function of each part whose code is not allowed to run."""
    if isinstance(node, list):
        for item in node:
            yield from _functions(item)
    elif isinstance(node, dict):
        options = node.get("init_args")
        if isinstance(options, dict) and "function" in options and not options.get("allow_code"):
            yield node.get("class_path"), options["function"]
        for item in node.values():
            yield from _functions(item)


def _parse_problems(text: str) -> list[str]:
    """Check the text of a recipe with rlkit itself; return the missing options and wrong values."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(f"{HEAD_LINES}{text}", encoding="utf-8")
        try:
            parse("convert", ["--recipe", str(path)])
        except RlkitError as error:
            return [one_line(line) for line in str(error).replace(str(path), "recipe").splitlines()]
    return []

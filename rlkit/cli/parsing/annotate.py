"""A recipe with every option, each under a comment that says what it does."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from docstring_parser import DocstringStyle
from docstring_parser import parse as parse_docstring

from rlkit.cli.parsing.schema import Choice, Names, Section, options, shape
from rlkit.hooks import KINDS
from rlkit.recipe import Recipe
from rlkit.registry import Registry

WIDTH = 110
"""Columns of a comment."""


def annotated(text: str, registry: Registry) -> str:
    """Return a recipe in YAML, with all its options, with comments from the documentation of sections and parts.

    Args:
        text: From `parse`: every option is filled in.
        registry: Has the parts that the recipe names.
    """
    return "\n".join(_Annotator(registry).sections(yaml.safe_load(text))) + "\n"


class _Annotator:
    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    def sections(self, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield the lines of a recipe, with an empty one between sections."""
        for number, (key, value) in enumerate(values.items()):
            yield from [""] * bool(number)
            yield from self._entry(key, value, options(Recipe)[key].hint, "", "")

    def _entry(self, key: str, value: Any, hint: object, comment: str, indent: str) -> Iterator[str]:
        """Yield the lines of an option: its comment, and its value."""
        inside = shape(hint, self.registry).inside
        if isinstance(inside, Section):
            comment = comment or _summary(inside.cls)
        if isinstance(inside, Choice):
            comment = comment or _summary(KINDS[inside.kind].interface)
            comment = f"{comment} One of: {', '.join(inside.parts) or 'none is installed'}."
        yield from textwrap.wrap(comment, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        if isinstance(inside, Section) and isinstance(value, Mapping):
            yield f"{indent}{_key(key)}"
            yield from self._options(value, inside.cls, f"{indent}  ")
        elif isinstance(inside, Choice) and isinstance(value, Mapping) and (part := inside.find(value["class_path"])):
            yield f"{indent}{_key(key)}"
            yield f"{indent}  class_path: {value['class_path']}"
            if value.get("init_args"):
                yield f"{indent}  init_args:"
                yield from self._options(value["init_args"], part.cls, f"{indent}    ")
        elif isinstance(inside, Names) and value and isinstance(value, Mapping):
            yield f"{indent}{_key(key)}"
            for name, inner in value.items():
                yield from self._entry(name, inner, inside.hint, "", f"{indent}  ")
        else:
            yield from textwrap.indent(yaml.safe_dump({key: value}, sort_keys=False), indent).splitlines()

    def _options(self, values: Mapping[str, Any], cls: type, indent: str) -> Iterator[str]:
        known, comments = options(cls), _comments(cls)
        for key, value in values.items():
            hint = known[key].hint if key in known else object
            yield from self._entry(key, value, hint, comments.get(key, ""), indent)


def _key(key: str) -> str:
    """Return a key as YAML has it before its value: quoted, where it must be."""
    return yaml.safe_dump({key: 0}).removesuffix(" 0\n")


def _comments(cls: type) -> dict[str, str]:
    """Return what a class's docstring says of each of its options."""
    found = parse_docstring(cls.__doc__ or "", DocstringStyle.GOOGLE)
    return {p.arg_name: " ".join((p.description or "").split()) for p in found.params}


def _summary(cls: type) -> str:
    return parse_docstring(cls.__doc__ or "", DocstringStyle.GOOGLE).short_description or ""

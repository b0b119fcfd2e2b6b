"""A recipe with every option, each under a comment that says what it does."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

import yaml

from rlkit.hooks import KINDS
from rlkit.recipe import Recipe
from rlkit.recipe.schema import Choice, DictOf, Section, descriptions, options, options_in, shape, summary
from rlkit.registry import Registry

WIDTH = 110
"""Columns of a comment."""


def annotated(text: str, registry: Registry) -> str:
    """Return a recipe in YAML with a comment on each option, from the documentation of sections and parts.

    Args:
        text: The YAML from `parse`: every option is filled in.
        registry: The parts that the recipe names.
    """
    return "\n".join(_Annotator(registry).sections(yaml.safe_load(text))) + "\n"


class _Annotator:
    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    def sections(self, values: Mapping[str, object]) -> Iterator[str]:
        """Yield the lines of a recipe, with an empty one between sections."""
        for number, (key, value) in enumerate(values.items()):
            yield from [""] * bool(number)
            yield from self._option(key, value, options(Recipe)[key].hint, "", "")

    def _option(self, key: str, value: object, hint: object, comment: str, indent: str) -> Iterator[str]:
        """Yield the lines of an option: its comment and its value."""
        structure = shape(hint, self.registry).structure
        if isinstance(structure, Section):
            comment = comment or summary(structure.cls)
        if isinstance(structure, Choice):
            comment = comment or summary(KINDS[structure.kind].interface)
            comment = f"{comment} One of: {', '.join(structure.parts) or 'none is installed'}."
        yield from textwrap.wrap(comment, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        described = options_in(structure, value)
        if not isinstance(value, Mapping) or not value or not (described or isinstance(structure, DictOf)):
            yield from textwrap.indent(yaml.safe_dump({key: value}, sort_keys=False), indent).splitlines()
            return
        yield f"{indent}{_key(key)}"
        if isinstance(structure, DictOf):
            for name, child in value.items():
                yield from self._option(name, child, structure.hint, "", f"{indent}  ")
        if described is None:
            return
        cls, arguments = described
        inner_indent = f"{indent}  "
        if isinstance(structure, Choice):
            yield f"{indent}  class_path: {value['class_path']}"
            yield from [f"{indent}  init_args:"] * bool(arguments)
            inner_indent = f"{indent}    "
        yield from self._options(arguments, cls, inner_indent)

    def _options(self, values: Mapping[str, object], cls: type, indent: str) -> Iterator[str]:
        by_name, comments = options(cls), descriptions(cls)
        for key, value in values.items():
            hint = by_name[key].hint if key in by_name else object
            yield from self._option(key, value, hint, comments.get(key, ""), indent)


def _key(key: str) -> str:
    """Return a key as YAML has it before its value: quoted if it must be."""
    return yaml.safe_dump({key: 0}).removesuffix(" 0\n")

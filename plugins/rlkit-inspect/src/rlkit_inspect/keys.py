"""The options of a recipe, those of all parts included, with the values that can be listed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, get_args, get_origin

from rlkit.recipe import Recipe
from rlkit.recipe.schema import UNIONS, Choice, Section, options, shape
from rlkit.registry import Registry


def values_by_key(registry: Registry) -> dict[str, tuple[str, ...]]:
    """Return every key of a recipe with the names of its parts, or its words; of others with nothing."""
    values_of: dict[str, tuple[str, ...]] = {}
    for key, values in _keys(Recipe, registry, ""):
        values_of[key] = tuple(dict.fromkeys((*values_of.get(key, ()), *values)))
    return values_of


def _keys(cls: type, registry: Registry, prefix: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, option in options(cls).items():
        allowed, key = shape(option.hint, registry), f"{prefix}{name}"
        inside = allowed.structure
        parts = tuple(inside.parts) if isinstance(inside, Choice) else ()
        yield key, (*parts, *_words(allowed.plain), *(("null",) if allowed.optional and parts else ()))
        if parts:
            yield f"{key}.help", parts
        nested = [inside.cls] if isinstance(inside, Section) else []
        if isinstance(inside, Choice) and prefix.count(".") < 2:  # a part inside of a part is written in a recipe
            nested = [part.cls for part in inside.parts.values()]
        for cls_inside in nested:
            yield from _keys(cls_inside, registry, f"{key}.")


def _words(hint: object) -> tuple[str, ...]:
    """Return the words of a type that has only so many."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _words(arguments[0])
    if origin in UNIONS:
        return tuple(word for argument in arguments for word in _words(argument))
    if origin is Literal:
        return tuple(map(str, arguments))
    return ("true", "false") if hint is bool else ()

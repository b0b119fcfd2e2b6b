"""Plain values: converted to the types of their options, and these types in words."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, Literal, get_args, get_origin

from jsonargparse import ArgumentError, ArgumentParser

from rlkit.base.ranges import expected
from rlkit.cli.parsing.reader import load
from rlkit.cli.parsing.schema import UNIONS, Choice, DictOf, ListOf, Section, options, shape, union_members
from rlkit.registry import Registry

WORDS: dict[object, str] = {
    int: "a whole number", float: "a number", bool: "true or false", str: "text", Any: "anything",
}  # fmt: skip


def convert(value: object, hint: object) -> object:
    """Return a plain value, or the one that a text represents, as a value of a type.

    Raises:
        ValueError: The value is not of the type, or out of its range.
    """
    loaded = _loaded(value)
    members = union_members(hint)
    words = [word for member in members if get_origin(member) is Literal for word in get_args(member)]
    if isinstance(loaded, bool) and not {bool, str, Any} & set(members) and loaded not in words:
        raise ValueError(f"{loaded} is not of the type {hint}")  # which Python would take for 0 or 1
    try:
        return _parser(hint).parse_object({"value": value}, env=False).value
    except (ArgumentError, TypeError, OverflowError) as error:
        raise ValueError(str(error)) from error


@functools.cache
def _parser(hint: object) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False, default_env=False)
    parser.add_argument("--value", type=hint)
    return parser


def structured(value: object) -> object:
    """Return the list, mapping or null that a text represents; any other value is returned as it is."""
    loaded = _loaded(value)
    return loaded if isinstance(loaded, dict | list) or loaded is None else value


def _loaded(value: object) -> object:
    try:
        return load(value) if isinstance(value, str) else value
    except ValueError:
        return value


def describe(hint: object, registry: Registry, value: object = None) -> str:
    """Return in words what a type allows; `value` is the one that it does not allow, if there is one."""
    allowed = shape(hint, registry)
    words = [_plain(allowed.plain, value)] if allowed.plain is not None else []
    structure = allowed.structure
    if isinstance(structure, Section):
        name = "a section" if allowed.plain is None else structure.cls.__name__
        words.append(f"{name} with: {', '.join(sorted(options(structure.cls)))}")
    elif isinstance(structure, Choice):
        words.append(f"the name of a class: {', '.join(structure.parts) or 'none is registered'}")
    elif isinstance(structure, DictOf):
        words.append(f"names, each with {describe(structure.hint, registry)}")
    elif isinstance(structure, ListOf):
        words.append(f"a list, each of it {describe(structure.hint, registry)}")
    text = " or ".join(words) or "nothing that a recipe can hold"
    return f"{text}, or null" if allowed.optional else text


def _plain(hint: object, value: object) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return expected(hint, value if arguments[0] is str else _loaded(value)) or _plain(arguments[0], value)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}" if len(arguments) > 1 else str(arguments[0])
    if origin in UNIONS:
        return " or ".join(_plain(argument, value) for argument in arguments)
    if isinstance(origin, type) and arguments:
        members = [_plain(argument, None) for argument in arguments if argument is not Ellipsis]
        return f"a mapping to {members[-1]}" if issubclass(origin, Mapping) else f"a list, each of it {members[0]}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(member.name for member in hint)}"
    return WORDS.get(hint) or str(getattr(hint, "__name__", hint))

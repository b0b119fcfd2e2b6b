"""What a recipe may hold at each key, read from the signatures of sections and registered parts, and as text."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser

from rlkit.cli.parsing.reader import load
from rlkit.hooks import kinds_of
from rlkit.ranges import expected
from rlkit.registry import Part, Registry

UNIONS = (Union, types.UnionType)


class Untyped:
    """Represents the type of an argument without an annotation."""


class Option(NamedTuple):
    """An option of a section or of a part: its type, whether it has no default, and the class of a default part."""

    hint: object
    required: bool
    part: type | None = None


class Section(NamedTuple):
    """A place for a dataclass's options."""

    cls: type


class Choice(NamedTuple):
    """A place for a registered part: the closed set of what may be named."""

    kind: str
    parts: dict[str, Part]

    def find(self, name: object) -> Part | None:
        """Return the part that a class's name or path means; None if it is none of these."""
        for part in self.parts.values():
            paths = import_paths(part.cls)
            if paths and name in (part.name, *paths):
                return part
        return None


class Names(NamedTuple):
    """A place for names, each with a value of one type.

    Args:
        hint: The type of the values.
        key: The type of the names.
    """

    hint: object
    key: object = str


class Items(NamedTuple):
    """A place for a list whose items are parts or sections."""

    hint: object


class Shape(NamedTuple):
    """What a type allows: null, something with keys of its own, and plain values of a type."""

    optional: bool
    inside: Section | Choice | Names | Items | None
    plain: object
    """The type of plain values; None if there can be none."""


def shape(hint: object, registry: Registry) -> Shape:
    """Return what a type allows."""
    members = get_args(hint) if get_origin(hint) in UNIONS else (hint,)
    members = tuple(Any if m is Untyped else m for m in members)
    optional = type(None) in members or Any in members
    inside, plain = None, []
    for member in members:
        found = _inside(member, registry)
        inside = inside or found
        if found is None and member is not type(None) and _is_data(member):
            plain.append(member)
    return Shape(optional, inside, functools.reduce(operator.or_, plain) if plain else None)


def _inside(hint: object, registry: Registry) -> Section | Choice | Names | Items | None:
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return Section(hint)
    if isinstance(hint, type) and (kinds := kinds_of(hint)):
        parts = registry.parts[kinds[0]]
        return Choice(kinds[0], {name: part for name, part in parts.items() if issubclass(part.cls, hint)})
    if isinstance(origin, type) and issubclass(origin, Mapping) and str in (arguments[0], *get_args(arguments[0])):
        return Names(arguments[1], arguments[0])
    listed = isinstance(origin, type) and issubclass(origin, Sequence) and origin is not tuple
    return Items(arguments[0]) if listed and shape(arguments[0], registry).inside is not None else None


def _is_data(hint: object) -> bool:
    """Whether a plain value fits the type: nothing that would have to be imported, called or built."""
    origin = get_origin(hint)
    if origin is Annotated:
        return _is_data(get_args(hint)[0])
    if origin is Literal or hint is Any:
        return True
    if origin is not None:
        kinds = origin in UNIONS or (isinstance(origin, type) and origin.__module__ in ("builtins", "collections.abc"))
        inner = [a for a in get_args(hint) if a is not Ellipsis]
        return kinds and origin is not type and origin is not Callable and all(_is_data(a) for a in inner)
    if not isinstance(hint, type):
        return False
    known = (str, int, float, bool, list, tuple, dict, set, frozenset, type(None))
    return hint in known or issubclass(hint, Enum | PurePath) or hint.__module__ in ("datetime", "decimal")


@functools.cache
def options(cls: type) -> dict[str, Option]:
    """Return the options of a section or of a part, by name, in the order of the constructor.

    Those that `**kwargs` pass on to a base class are among them. A type that cannot be found out is `Any`.
    """
    if is_dataclass(cls):
        hints = get_type_hints(cls, include_extras=True)
        return {
            f.name: Option(hints[f.name], f.default is MISSING and f.default_factory is MISSING, _part(f))
            for f in fields(cls)
            if f.init
        }
    found: dict[str, Option] = {}
    for base in cls.__mro__:
        init = vars(base).get("__init__")
        if init is None or base is object:
            continue
        parameters = list(inspect.signature(init).parameters.values())[1:]
        for p in parameters:
            if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name not in found:
                found[p.name] = Option(_hint(p, init), p.default is p.empty)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return found


def _part(option: Field[object]) -> type | None:
    """Return the class of the part that an option is by default."""
    made = option.default_factory
    return made if isinstance(made, type) and kinds_of(made) else None


def _hint(parameter: inspect.Parameter, init: object) -> object:
    """Return a parameter's type; Any where only type checkers know it."""
    if parameter.annotation is parameter.empty:
        return Untyped
    stub = types.SimpleNamespace(__annotations__={"x": parameter.annotation})
    try:
        return get_type_hints(stub, getattr(init, "__globals__", {}), include_extras=True)["x"]
    except NameError:
        return Any


def import_paths(cls: type) -> list[str]:
    """Return the paths by which loaded modules know a class, the shortest first; nothing is imported."""
    parts = cls.__module__.split(".")
    modules = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return [f"{name}.{cls.__name__}" for name in modules if vars(sys.modules.get(name, types)).get(cls.__name__) is cls]


def reachable(cls: type, registry: Registry, seen: set[type] | None = None) -> set[type]:
    """Return a section's class, and all classes of sections and parts that can stand in it."""
    seen = set() if seen is None else seen
    if cls not in seen:
        seen.add(cls)
        for option in options(cls).values():
            for inner in _classes(option.hint, registry):
                reachable(inner, registry, seen)
    return seen


def _classes(hint: object, registry: Registry) -> Iterator[type]:
    inside = shape(hint, registry).inside
    if isinstance(inside, Section):
        yield inside.cls
    elif isinstance(inside, Choice):
        yield from (part.cls for part in inside.parts.values())
    elif inside is not None:
        yield from _classes(inside.hint, registry)


def fits(value: object, hint: object) -> bool:
    """Whether a plain value, or the text of one, is of a type and in its range."""
    loaded = _loaded(value)
    members = get_args(hint) if get_origin(hint) in UNIONS else (hint,)
    if isinstance(loaded, bool) and not {bool, str, Any} & set(members):
        return loaded in [a for m in members if get_origin(m) is Literal for a in get_args(m)]
    try:
        _checker(hint).parse_object({"value": value}, env=False)
    except (ArgumentError, ValueError, TypeError, OverflowError):
        return False
    return True


def _loaded(value: object) -> object:
    try:
        return load(value) if isinstance(value, str) else value
    except ValueError:
        return value


@functools.cache
def _checker(hint: object) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False, default_env=False)
    parser.add_argument("--value", type=hint)
    return parser


def describe(hint: object, registry: Registry, value: object = None) -> str:
    """Return in words what a type allows, for the message about a value that it does not allow."""
    allowed = shape(hint, registry)
    words = [_plain(allowed.plain, value)] if allowed.plain is not None else []
    inside = allowed.inside
    if isinstance(inside, Section):
        name = "a section" if allowed.plain is None else inside.cls.__name__
        words.append(f"{name} with: {', '.join(sorted(options(inside.cls)))}")
    elif isinstance(inside, Choice):
        words.append(f"the name of a class: {', '.join(inside.parts) or 'none is registered'}")
    elif isinstance(inside, Names):
        words.append(f"names, each with {describe(inside.hint, registry)}")
    elif isinstance(inside, Items):
        words.append(f"a list, each of it {describe(inside.hint, registry)}")
    text = " or ".join(words) or "nothing that a recipe can hold"
    return f"{text}, or null" if allowed.optional else text


PLAIN: dict[object, str] = {
    int: "a whole number", float: "a number", bool: "true or false", str: "text", Any: "anything",
}  # fmt: skip


def _plain(hint: object, value: object) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return expected(hint, value if arguments[0] is str else _loaded(value)) or _plain(arguments[0], value)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}" if len(arguments) > 1 else str(arguments[0])
    if origin in UNIONS:
        return " or ".join(_plain(a, value) for a in arguments)
    if isinstance(origin, type) and arguments:
        inner = [_plain(a, None) for a in arguments if a is not Ellipsis]
        return f"a mapping to {inner[-1]}" if issubclass(origin, Mapping) else f"a list, each of it {inner[0]}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(member.name for member in hint)}"
    return PLAIN.get(hint) or str(getattr(hint, "__name__", hint))

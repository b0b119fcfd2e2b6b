"""What a recipe may hold at each key, read from the signatures of sections and registered parts."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from docstring_parser import DocstringStyle
from docstring_parser import parse as parse_docstring

from rlkit.base.text import source_of
from rlkit.hooks import kinds_of
from rlkit.registry import Part, Registry

UNIONS = (Union, types.UnionType)


class Option(NamedTuple):
    """An option of a section or of a part.

    Args:
        hint: Its type.
        default: Its default; `MISSING` if it is required.
        untyped_in: The class that states no type for it, so that its default's counts; None if the type is stated.
    """

    hint: object
    default: object = MISSING
    untyped_in: type | None = None

    @property
    def required(self) -> bool:
        """Whether the option has no default."""
        return self.default is MISSING


class Section(NamedTuple):
    """A key that holds the options of a dataclass."""

    cls: type


class Choice(NamedTuple):
    """A key that names a registered part: a closed set."""

    kind: str
    parts: dict[str, Part]

    def find(self, name: object) -> Part | None:
        """Return the part with this class name or import path; None if there is no such part."""
        for part in self.parts.values():
            paths = import_paths(part.cls)
            if paths and name in (part.name, *paths):
                return part
        return None


class DictOf(NamedTuple):
    """A key that holds a mapping from names to values of one type.

    Args:
        hint: The type of the values.
        key: The type of the names.
    """

    hint: object
    key: object = str


class ListOf(NamedTuple):
    """A key that holds a list of parts or sections."""

    hint: object


Structure = Section | Choice | DictOf | ListOf
"""A value with keys of its own."""


class Shape(NamedTuple):
    """What a type allows.

    Args:
        optional: Whether null is allowed.
        structure: The structured value that is allowed; None if there is none.
        plain: The type of the plain values that are allowed; None if there are none.
    """

    optional: bool
    structure: Structure | None
    plain: object


def shape(hint: object, registry: Registry) -> Shape:
    """Describe the values that a type allows."""
    members = union_members(hint)
    structures = {member: _structure(member, registry) for member in members if member is not type(None)}
    plain = [member for member, structure in structures.items() if structure is None and _is_data(member)]
    structure = next((structure for structure in structures.values() if structure is not None), None)
    return Shape(
        type(None) in members or Any in members,
        structure,
        functools.reduce(operator.or_, plain) if plain else None,  # type: ignore[arg-type]
    )


def union_members(hint: object) -> tuple[object, ...]:
    """Return the members of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in UNIONS else (hint,)


def _structure(hint: object, registry: Registry) -> Structure | None:
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return Section(hint)
    kinds = kinds_of(hint) if isinstance(hint, type) else []
    if isinstance(hint, type) and kinds:
        parts = registry.parts[kinds[0]]
        return Choice(kinds[0], {name: part for name, part in parts.items() if issubclass(part.cls, hint)})
    if isinstance(origin, type) and issubclass(origin, Mapping) and str in (arguments[0], *get_args(arguments[0])):
        return DictOf(arguments[1], arguments[0])
    is_list = isinstance(origin, type) and issubclass(origin, Sequence) and origin is not tuple
    return ListOf(arguments[0]) if is_list and shape(arguments[0], registry).structure is not None else None


def _is_data(hint: object) -> bool:
    """Whether values of a type are plain data, so that nothing is imported, called or built."""
    origin = get_origin(hint)
    if origin is Annotated:
        return _is_data(get_args(hint)[0])
    if origin is Literal or hint is Any:
        return True
    if origin is not None:
        is_container = isinstance(origin, type) and origin.__module__ in ("builtins", "collections.abc")
        if origin in (type, Callable) or not (is_container or origin in UNIONS):
            return False
        return all(_is_data(argument) for argument in get_args(hint) if argument is not Ellipsis)
    if not isinstance(hint, type):
        return False
    types_of_data = (str, int, float, bool, list, tuple, dict, set, frozenset, type(None))
    return hint in types_of_data or issubclass(hint, Enum | PurePath) or hint.__module__ in ("datetime", "decimal")


@functools.cache
def options(cls: type) -> dict[str, Option]:
    """Return the options of a section or of a part, by name, in the order of the constructor.

    Those that `**kwargs` pass on to a base class are included. A type that cannot be resolved is `Any`.
    """
    if is_dataclass(cls):
        hints = get_type_hints(cls, include_extras=True)
        return {
            f.name: Option(hints[f.name], f.default if f.default_factory is MISSING else f.default_factory())
            for f in fields(cls)
            if f.init
        }
    by_name: dict[str, Option] = {}
    for base in cls.__mro__:
        init = vars(base).get("__init__")
        if init is None or base is object:
            continue
        parameters = list(inspect.signature(init).parameters.values())[1:]
        for p in parameters:
            if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name not in by_name:
                default = MISSING if p.default is p.empty else p.default
                by_name[p.name] = Option(_hint(p, init), default, base if p.annotation is p.empty else None)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return by_name


def _hint(parameter: inspect.Parameter, init: object) -> object:
    """Return a parameter's type, or that of its default; `Any` if only type checkers can resolve it."""
    if parameter.annotation is parameter.empty:
        return {bool: bool, int: int | float, float: float, str: str}.get(type(parameter.default), Any)
    stub = types.SimpleNamespace(__annotations__={"x": parameter.annotation})
    try:
        return get_type_hints(stub, getattr(init, "__globals__", {}), include_extras=True)["x"]
    except NameError:
        return Any


def import_paths(cls: type) -> list[str]:
    """Return the paths from which loaded modules export a class, the shortest first; nothing is imported.

    A part that comes with rlkit has the path of its kind's package, whichever package it is in.
    """
    parts = cls.__module__.split(".")
    modules = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    paths = [f"{name}.{cls.__name__}" for name in modules if getattr(sys.modules.get(name), cls.__name__, None) is cls]
    if parts[0] == "rlkit" or source_of(cls.__module__):
        return paths
    return [*(f"rlkit.{kind}.{cls.__name__}" for kind in kinds_of(cls)), *paths]


def options_in(structure: Structure | None, node: object) -> tuple[type, Mapping[str, object]] | None:
    """Return the class that a node of a section or part describes, and its options; None for any other node."""
    if isinstance(structure, Section) and isinstance(node, Mapping):
        return structure.cls, node
    part = structure.find(node["class_path"]) if isinstance(structure, Choice) and isinstance(node, Mapping) else None
    return None if part is None else (part.cls, node.get("init_args") or {})  # type: ignore[attr-defined]


def as_data(value: object, registry: Registry) -> object:
    """Return sections and parts as the data of a recipe; parts that no recipe can name are returned as they are."""
    if kinds_of(type(value)):
        return _part(value, registry)
    if is_dataclass(value) and not isinstance(value, type):
        hints = {name: option.hint for name, option in options(type(value)).items()}
        values = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        return {
            name: as_data(field_value, registry)
            for name, field_value in values.items()
            if field_value is not None or shape(hints[name], registry).optional
        }
    if isinstance(value, Mapping):
        return {name: as_data(child, registry) for name, child in value.items()}
    return [as_data(child, registry) for child in value] if isinstance(value, list | tuple) else value


def _part(part: object, registry: Registry) -> object:
    """Return a registered part's class and options, as it keeps them; any other part as it is."""
    cls: type = type(part)
    registered = registry.parts[kinds_of(cls)[0]].get(cls.__name__)
    names = options(cls)
    if registered is None or registered.cls is not cls or not all(hasattr(part, name) for name in names):
        return part
    arguments = {name: as_data(getattr(part, name), registry) for name in names}
    return {"class_path": cls.__name__, "init_args": arguments}


def summary(cls: type) -> str:
    """Return the first sentence of a class's docstring."""
    return parse_docstring(cls.__doc__ or "", DocstringStyle.GOOGLE).short_description or ""


def descriptions(cls: type) -> dict[str, str]:
    """Return the documentation of a class's options, from its docstring and those of its base classes."""
    by_name: dict[str, str] = {}
    for base in cls.__mro__:
        for text in (base.__doc__, getattr(vars(base).get("__init__"), "__doc__", None)):
            for parameter in parse_docstring(text or "", DocstringStyle.GOOGLE).params:
                by_name.setdefault(parameter.arg_name, " ".join((parameter.description or "").split()))
    return by_name

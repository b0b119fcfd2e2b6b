"""Python objects in recipes: written as the data that names them, or described if no recipe can name them."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum

from rlkit.cli.parsing.schema import options, shape
from rlkit.hooks import kinds_of
from rlkit.registry import Registry

PYTHON = "python object: "
"""The prefix, in a written recipe, of the text that stands for an object that no recipe can name."""


def is_described(value: object) -> bool:
    """Whether a value is the text that stands for a Python object."""
    return isinstance(value, str) and value.startswith(PYTHON)


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


def plain(value: object) -> object:
    """Return a recipe's tree as data that YAML can hold; a text stands for each Python object."""
    if isinstance(value, Mapping):
        is_bare = "class_path" in value and not value.get("init_args")
        return {name: plain(child) for name, child in value.items() if not (is_bare and name == "init_args")}
    if isinstance(value, list | tuple | Set):
        return [plain(child) for child in value]
    if isinstance(value, Enum):
        return value.name
    if value is None or type(value) in (bool, int, float, str):
        return value
    return describe(value) if kinds_of(type(value)) else str(value)


def describe(part: object) -> str:
    """Return the text that stands for an object: its `repr`, or its class if the `repr` is an address in memory."""
    cls = type(part)
    has_repr = cls.__repr__ is not object.__repr__
    return PYTHON + (repr(part) if has_repr else f"{cls.__qualname__} of {cls.__module__}")

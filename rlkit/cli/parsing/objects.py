"""Python objects in recipes: written as the data that names them, or described where no recipe can name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from jsonargparse import Namespace

from rlkit.cli.parsing.schema import options, shape
from rlkit.hooks import kinds_of
from rlkit.registry import Registry

PYTHON = "python object: "
"""The prefix, in a written recipe, of the text in place of an object that no recipe can name."""


def is_part(value: object) -> bool:
    """Whether a value is a part itself, and not what names one."""
    return bool(kinds_of(type(value)))


def is_described(value: object) -> bool:
    """Whether a value is the text in place of an object that only Python can hand over."""
    return isinstance(value, str) and value.startswith(PYTHON)


def as_data(value: object, registry: Registry) -> Any:
    """Return sections and parts as the data that a recipe would have; parts that none can name stay as they are."""
    if is_part(value):
        return _part(value, registry)
    if is_dataclass(value) and not isinstance(value, type):
        known = options(type(value))
        given = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        unset = [name for name, inner in given.items() if inner is None and not _optional(known[name].hint, registry)]
        return {name: as_data(inner, registry) for name, inner in given.items() if name not in unset}
    if isinstance(value, Mapping):
        return {name: as_data(inner, registry) for name, inner in value.items()}
    return [as_data(inner, registry) for inner in value] if isinstance(value, list | tuple) else value


def _optional(hint: object, registry: Registry) -> bool:
    return shape(hint, registry).optional


def _part(part: object, registry: Registry) -> object:
    """Return a registered part's class and options, as it keeps them; another part as it is."""
    cls: type = type(part)
    known = registry.parts[kinds_of(cls)[0]].get(cls.__name__)
    names = options(cls)
    if known is None or known.cls is not cls or not all(hasattr(part, name) for name in names):
        return part
    given = {name: as_data(getattr(part, name), registry) for name in names}
    return {"class_path": cls.__name__, "init_args": given}


def without_objects(section: object) -> object:
    """Return a parsed section, changed in place where it can be, in which texts stand for objects."""
    if isinstance(section, Namespace):
        for name, value in vars(section).items():
            setattr(section, name, without_objects(value))
    elif isinstance(section, dict):
        return {name: without_objects(value) for name, value in section.items()}
    elif isinstance(section, list):
        return [without_objects(value) for value in section]
    return describe(section) if is_part(section) else section


def describe(part: object) -> str:
    """Return the text in place of an object: its own text, or its class where that would be a place in memory."""
    cls = type(part)
    own = cls.__repr__ is not object.__repr__
    return PYTHON + (repr(part) if own else f"{cls.__qualname__} of {cls.__module__}")

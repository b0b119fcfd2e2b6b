"""The tree of a composed recipe: its nodes by key, as data that YAML can hold, and as sections and parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import MISSING
from enum import Enum
from typing import NamedTuple

from rlkit.base.errors import RecipeError, RlkitError, explain_foreign, with_definition
from rlkit.base.text import part_name
from rlkit.hooks import kinds_of
from rlkit.recipe.parsing import suggest
from rlkit.recipe.schema import Choice, DictOf, ListOf, Section, Shape, options, options_in, shape
from rlkit.registry import Registry

Tree = dict[str, object]
PYTHON = "python object: "
"""The prefix, in a written recipe, of the text that stands for an object that no recipe can name."""


class Unresolved(NamedTuple):
    """The value of a plain option that refers to other options, until all of these are composed."""

    hint: object
    allowed: Shape
    value: object


def node_at(node: object, key: str) -> object:
    """Return the node of a recipe's tree at a dotted key; `MISSING` without one."""
    for name in key.split("."):
        if isinstance(node, Mapping) and "class_path" in node:
            node = node.get("init_args")
        if isinstance(node, list | tuple) and name.isdecimal():
            node = dict(enumerate(node)).get(int(name), MISSING)
        else:
            node = node.get(name, MISSING) if isinstance(node, Mapping) else MISSING
    return node


def is_described(value: object) -> bool:
    """Whether a value is the text that stands for a Python object."""
    return isinstance(value, str) and value.startswith(PYTHON)


def plain(value: object) -> object:
    """Return a recipe's tree as data that YAML can hold; a text stands for each Python object."""
    if isinstance(value, Mapping):
        is_bare = "class_path" in value and not value.get("init_args")
        return {name: plain(child) for name, child in value.items() if not (is_bare and name == "init_args")}
    if isinstance(value, list | tuple | Set):
        return [plain(child) for child in value]
    if isinstance(value, Unresolved):
        return value.value
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


def missing(key: str, hint: object, node: object, registry: Registry) -> Iterator[tuple[str, str]]:
    """Yield key and problem of each required option that is not set, and each object that only Python can provide."""
    structure = shape(hint, registry).structure
    if isinstance(structure, Choice) and is_described(node):
        name = str(node).removeprefix(PYTHON)
        problem = f"{key} is the Python object {name}, which no recipe can name: run it from Python, where "
        yield key, f"{problem}fit(recipe, resume=FOLDER) goes on with a run, or pass --{key}"
    if isinstance(structure, DictOf | ListOf) and isinstance(node, Mapping | list):
        children: Iterable[tuple[object, object]] = node.items() if isinstance(node, Mapping) else enumerate(node)
        for index_or_name, child in children:
            yield from missing(f"{key}.{index_or_name}", structure.hint, child, registry)
    described = options_in(structure, node)
    if described is None:
        return
    cls, values = described
    owner = key if isinstance(structure, Section) else f"{key} {cls.__name__}"
    for name, option in options(cls).items():
        if name in values:
            yield from missing(f"{key}.{name}", option.hint, values[name], registry)
        elif option.required:
            words = suggest.describe(option.hint, registry)
            where = "it" if isinstance(structure, Section) else "its init_args"
            remedy = f"write `{name}: ...` with {words} in {where}, or pass --{suggest.settable(f'{key}.{name}')}"
            yield f"{key}.{name}", f"{owner} needs {name!r}, which is not given: {remedy}"


def instantiate(hint: object, node: object, registry: Registry) -> object:
    """Return the section, the part or the plain value that a node describes."""
    structure = shape(hint, registry).structure
    if isinstance(structure, ListOf) and isinstance(node, list):
        return [instantiate(structure.hint, child, registry) for child in node]
    if isinstance(structure, DictOf) and isinstance(node, Mapping):
        return {name: instantiate(structure.hint, child, registry) for name, child in node.items()}
    described = options_in(structure, node)
    if described is None:
        return node
    cls, values = described
    arguments = {name: instantiate(options(cls)[name].hint, child, registry) for name, child in values.items()}
    try:
        return cls(**arguments)
    except RlkitError:
        raise
    except Exception as error:  # a plugin's constructor may raise anything
        problem = f"the recipe cannot be built: {part_name(cls)} raised {explain_foreign(error)}"
        raise RecipeError(
            f"{with_definition(problem, cls, '__init__')}; its constructor only stores options"
        ) from error

"""From Python objects to a recipe's data, and from its tree to the sections and parts that it describes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from enum import Enum

from rlkit.base.errors import RecipeError, RlkitError, explain_foreign, with_definition
from rlkit.base.text import part_name
from rlkit.hooks import kinds_of
from rlkit.recipe.parsing import suggest
from rlkit.recipe.schema import Choice, DictOf, ListOf, Section, options, options_in, shape
from rlkit.registry import Registry

PYTHON = "python object: "
"""The prefix, in a written recipe, of the text that stands for an object that no recipe can name."""


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
            problem = f"{owner} needs {name!r}, which is not given; expected --{key}.{name} with {words}"
            yield f"{key}.{name}", problem


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

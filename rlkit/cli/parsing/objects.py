"""From Python objects to a recipe's data, and from its tree to the sections and parts that it describes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum

from rlkit.base.errors import RecipeError, RlkitError, explain_foreign, with_definition
from rlkit.base.text import part_name
from rlkit.cli.parsing import suggest
from rlkit.cli.parsing.schema import Choice, DictOf, ListOf, Section, Structure, options, shape
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


def options_in(structure: Structure | None, node: object) -> tuple[type, Mapping[str, object]] | None:
    """Return the class that a node of a section or part describes, and its options; None for any other node."""
    if isinstance(structure, Section) and isinstance(node, Mapping):
        return structure.cls, node
    part = structure.find(node["class_path"]) if isinstance(structure, Choice) and isinstance(node, Mapping) else None
    return None if part is None else (part.cls, node.get("init_args") or {})  # type: ignore[attr-defined]


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

"""From a composed tree to a recipe: defaults are filled in, then sections and parts are instantiated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass

from rlkit.cli.parsing.objects import PYTHON, as_data, is_described
from rlkit.cli.parsing.problems import Problems
from rlkit.cli.parsing.schema import Choice, DictOf, ListOf, Option, Section, options, shape
from rlkit.cli.parsing.values import describe
from rlkit.hooks import kinds_of
from rlkit.recipe import Recipe
from rlkit.registry import Registry

Tree = dict[str, object]


def complete(tree: Mapping[str, object], registry: Registry, problems: Problems) -> Tree:
    """Return a recipe's tree with every option filled in; note required options that are missing."""
    required = [name for name, option in options(Recipe).items() if option.required and name not in tree]
    missing = [name for name in required if not problems.concern(name)]
    if missing:
        problems.append(f"the recipe has no {', '.join(missing)}; add it to the recipe or pass --{missing[0]}")
    completion = _Completion(registry, problems)
    return {
        name: completion.node(name, option.hint, tree[name]) if name in tree else completion.default(option)
        for name, option in options(Recipe).items()
        if name in tree or not option.required
    }


class _Completion:
    def __init__(self, registry: Registry, problems: Problems) -> None:
        self.registry = registry
        self.problems = problems

    def node(self, key: str, hint: object, value: object) -> object:
        """Return a value of a type with all its options."""
        structure = shape(hint, self.registry).structure
        if isinstance(structure, Choice) and is_described(value):
            name = str(value).removeprefix(PYTHON)
            self.problems.note(
                key,
                f"{key} is the Python object {name}, which no recipe can name: run it from Python, where "
                f"fit(recipe, resume=FOLDER) goes on with a run, or pass --{key}",
            )
        if isinstance(structure, ListOf) and isinstance(value, list):
            return [self.node(f"{key}.{index}", structure.hint, child) for index, child in enumerate(value)]
        if not isinstance(value, Mapping):
            return value
        if isinstance(structure, DictOf):
            return {name: self.node(f"{key}.{name}", structure.hint, child) for name, child in value.items()}
        if isinstance(structure, Section):
            return self._options(structure.cls, key, key, value)
        part = structure.find(value["class_path"]) if isinstance(structure, Choice) else None
        if part is None:
            return value
        arguments = self._options(part.cls, key, f"{key} {part.name}", value["init_args"])
        return {"class_path": value["class_path"], "init_args": arguments}

    def _options(self, cls: type, key: str, owner: str, values: Mapping[str, object]) -> Tree:
        """Return all options of a section or of a part."""
        node: Tree = {}
        for name, option in options(cls).items():
            option_key = f"{key}.{name}"
            if name in values:
                node[name] = self.node(option_key, option.hint, values[name])
            elif not option.required:
                node[name] = self.default(option)
            elif not self.problems.concern(option_key):
                self.problems.note(
                    option_key,
                    f"{owner} needs {name!r}, which is not given; expected --{option_key} with "
                    f"{describe(option.hint, self.registry)}",
                )
        return node

    def default(self, option: Option) -> object:
        """Return an option's default as a node of its own."""
        default = option.default
        if isinstance(shape(option.hint, self.registry).structure, Section) and is_dataclass(default):
            cls: type = type(default)
            hints = {name: child.hint for name, child in options(cls).items()}
            return {name: self.default(Option(hint, getattr(default, name))) for name, hint in hints.items()}
        is_part = bool(kinds_of(type(default)))
        return as_data(default, self.registry) if is_part or isinstance(default, list | dict) else default


def instantiate(hint: object, node: object, registry: Registry) -> object:
    """Return the section, the part or the plain value that a complete node describes."""
    structure = shape(hint, registry).structure
    if isinstance(structure, ListOf) and isinstance(node, list):
        return [instantiate(structure.hint, child, registry) for child in node]
    if not isinstance(node, Mapping) or structure is None or isinstance(structure, ListOf):
        return node
    if isinstance(structure, DictOf):
        return {name: instantiate(structure.hint, child, registry) for name, child in node.items()}
    cls, values = None, node
    if isinstance(structure, Section):
        cls = structure.cls
    elif (part := structure.find(node["class_path"])) is not None:
        cls, values = part.cls, node["init_args"]
    if cls is None:
        return node
    arguments = {name: instantiate(options(cls)[name].hint, child, registry) for name, child in values.items()}
    return cls(**arguments)

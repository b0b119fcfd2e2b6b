"""`rlkit recipe show --python`: a recipe as a script for the Python API."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from rlkit.recipe import Recipe
from rlkit.recipe.schema import DictOf, ListOf, as_data, import_paths, options, options_in, shape
from rlkit.registry import Registry

WIDTH = 100
"""Characters of a line, beyond which a call is broken into several."""


def as_python(recipe_yaml: str, title: str, registry: Registry) -> str:
    """Return a script that runs a recipe; options that have their default value are left out.

    Args:
        recipe_yaml: Every option filled in, without credentials.
        title: The script's docstring.
        registry: The parts that the recipe may name.
    """
    tree = yaml.safe_load(recipe_yaml)
    printer, arguments = _Printer(), _arguments(tree, Recipe, registry)
    arguments |= dict.fromkeys(name for name in ("reward", "advantage") if tree.get(name) is None)  # not so in Python
    recipe = printer.call("Recipe", arguments, 0)
    return (
        f'"""{title}"""\n\nfrom rlkit import Recipe, fit\n{printer.imports()}\n'
        f"recipe = {recipe}\n\nresult = fit(recipe)\nprint(result)\n"
    )


@dataclass
class _Made:
    """A section or a part, by its class and the options that are not the default."""

    cls: type
    arguments: dict[str, object]


def _arguments(values: Mapping[str, object], cls: type, registry: Registry) -> dict[str, object]:
    """Return the options of a section or of a part, but for those that have their default value."""
    arguments = {}
    for name, value in values.items():
        option = options(cls)[name]
        node = _node(value, option.hint, registry)
        if option.required or node != _node(as_data(option.default, registry), option.hint, registry):
            arguments[name] = node
    return arguments


def _node(value: Any, hint: object, registry: Registry) -> object:
    """Return a value of a recipe, sections and parts in it as `_Made`."""
    inside = shape(hint, registry).structure
    if isinstance(inside, ListOf) and isinstance(value, list):
        return [_node(item, inside.hint, registry) for item in value]
    if isinstance(inside, DictOf) and isinstance(value, Mapping):
        return {name: _node(item, inside.hint, registry) for name, item in value.items()}
    described = options_in(inside, value)
    if described is None:
        return value
    cls, options_of_cls = described
    return _Made(cls, _arguments(options_of_cls, cls, registry))


class _Printer:
    """Writes values as Python, and notes what these import."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, str]] = {}
        """By the name in the script: a class's module, and its name there."""

    def call(self, name: str, arguments: Mapping[str, object], indent: int) -> str:
        written_arguments = [f"{key}={self._value(value, indent + 4)}" for key, value in arguments.items()]
        return self._within(f"{name}(", written_arguments, ")", indent)

    def imports(self) -> str:
        lines = defaultdict(list)
        for name, (module, original) in sorted(self._known.items()):
            lines[module].append(original if name == original else f"{original} as {name}")
        return "".join(f"from {module} import {', '.join(names)}\n" for module, names in sorted(lines.items()))

    def _value(self, value: object, indent: int) -> str:
        if isinstance(value, _Made):
            return self.call(self._name(value.cls), value.arguments, indent)
        if isinstance(value, list):
            return self._within("[", [self._value(item, indent + 4) for item in value], "]", indent)
        if isinstance(value, Mapping):
            items = [f"{self._value(key, 0)}: {self._value(item, indent + 4)}" for key, item in value.items()]
            return self._within("{", items, "}", indent)
        return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)

    def _within(self, start: str, items: list[str], end: str, indent: int) -> str:
        """Return items between brackets: in one line, or each in its own."""
        line = start + ", ".join(items) + end
        if indent + len(line) <= WIDTH and "\n" not in line:
            return line
        return start + "".join(f"\n{' ' * (indent + 4)}{item}," for item in items) + f"\n{' ' * indent}{end}"

    def _name(self, cls: type) -> str:
        """Return the name of a class in the script, and import it there."""
        module, _, class_name = import_paths(cls)[0].rpartition(".")
        name = class_name
        while self._known.setdefault(name, (module, class_name)) != (module, class_name):
            name += "_"
        return name

"""Parts that come with rlkit but not in its package: those of the packages in `plugins/` that its wheel holds.

They register themselves through the hooks, as an installed plugin's parts do; rlkit's own metadata names their modules
as its entry points. For recipes, scripts and saved runs they have the same paths as parts in the package:
`rlkit.rewards.MathReward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from rlkit.base.errors import PluginError
from rlkit.base.installed import PARTS, comes_with_rlkit, entry_points
from rlkit.hooks import kinds_of

T = TypeVar("T")


def shelf_parts() -> Iterator[type]:
    """Import the packages that come with rlkit, in the order of their names; yield the classes that they register."""
    for entry in sorted(entry_points(PARTS), key=lambda entry: entry.name):
        if comes_with_rlkit(entry):
            parts: list[type] = []
            entry.load().rlkit_register(parts.append)
            yield from parts


def provider(interface: type[T]) -> type[T]:
    """Return the class that a package of the shelf registers for an interface which no recipe names.

    Raises:
        PluginError: The package is not part of this installation.
    """
    for cls in shelf_parts():
        if issubclass(cls, interface):
            return cls
    raise PluginError(f"no package that comes with rlkit provides {interface.__name__}; install rlkit again")


def attribute_of(kind: str) -> Callable[[str], type]:
    """Make the `__getattr__` of the package of a kind, which serves the parts of that kind by their names."""

    def serve(name: str) -> type:
        if name[:1].isupper():  # a class; the import of a submodule asks for its name, too
            for part in shelf_parts():
                if part.__name__ == name and kind in kinds_of(part):
                    return part
        raise AttributeError(f"module 'rlkit.{kind}' has no attribute {name!r}")

    return serve

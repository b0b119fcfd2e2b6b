"""Parts that come with rlkit but not in its package: those of the packages in `plugins/` that its wheel holds.

They register themselves through the hooks, as an installed plugin's parts do; rlkit's own metadata names their modules
as its entry points. For recipes, scripts and saved runs they have the same paths as parts in the package:
`rlkit.rewards.MathReward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

from rlkit.base.installed import DISTRIBUTION, PARTS, entry_points
from rlkit.hooks import kinds_of


def shelf() -> Iterator[ModuleType]:
    """Import the modules with hooks of the packages that come with rlkit, in the order of their names."""
    for entry in sorted(entry_points(PARTS), key=lambda entry: entry.name):
        if entry.dist is not None and entry.dist.name == DISTRIBUTION:
            yield entry.load()


def attribute_of(kind: str) -> Callable[[str], type]:
    """Make the `__getattr__` of the package of a kind, which serves the parts of that kind by their names."""

    def serve(name: str) -> type:
        if not name.startswith("_"):
            for module in shelf():
                part = getattr(module, name, None)
                if name in module.__all__ and isinstance(part, type) and kind in kinds_of(part):
                    return part
        raise AttributeError(f"module 'rlkit.{kind}' has no attribute {name!r}")

    return serve

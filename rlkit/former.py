"""Import paths that modules had before they moved, for packages that still use them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

FORMER = {
    "rlkit.errors": "rlkit.base.errors",
    "rlkit.names": "rlkit.base.names",
    "rlkit.ranges": "rlkit.base.ranges",
    "rlkit.sections": "rlkit.recipe",
    "rlkit.text": "rlkit.base.text",
}
"""The module that each former path leads to."""


class FormerPaths(MetaPathFinder, Loader):
    """Finds a module by a former path, after all other finders, and warns about the path."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a former path; None for any other."""
        return ModuleSpec(name, self) if name in FORMER else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a module whose names are looked up in the one that moved."""
        moved = import_module(FORMER[spec.name])
        warnings.warn(f"{spec.name} is now {moved.__name__}", DeprecationWarning, stacklevel=2)
        module = ModuleType(spec.name, moved.__doc__)
        vars(module).update({name: value for name, value in vars(moved).items() if not name.startswith("__")})
        vars(module)["__getattr__"] = partial(getattr, moved)  # of names that it imports when they are asked for
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module that moved has run."""


def serve_former_paths() -> None:
    """Let `import` find the former paths."""
    if not any(isinstance(finder, FormerPaths) for finder in sys.meta_path):
        sys.meta_path.append(FormerPaths())

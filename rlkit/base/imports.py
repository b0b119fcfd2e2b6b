"""Packages: those that load much more than rlkit uses, and the versions that plugins adapt."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from importlib.util import find_spec, module_from_spec
from threading import RLock
from types import ModuleType
from typing import Any

from packaging.specifiers import SpecifierSet

from rlkit.base.errors import RecipeError, UnavailableError

HEAVY = ("lightning", "torchmetrics", "scipy")
"""`import lightning.fabric` also loads lightning.pytorch, and all of torchmetrics only to look at its version."""

FUNCTIONS = {"scipy.optimize": "linear_sum_assignment"}
"""A function, by module, that is imported with every model of transformers, and called by losses of detectors alone."""


class LazyPackage(ModuleType):
    """A package whose submodules can be imported; its own code runs when a name is asked for that it has not yet."""

    def __getattr__(self, name: str) -> Any:
        submodule = sys.modules.get(f"{self.__name__}.{name}")
        if submodule is not None:
            return submodule  # which is being imported
        _execute(self)
        return getattr(self, name)


_lock = RLock()


def _execute(module: ModuleType) -> None:
    """Run the code of a lazy package, unless it has run."""
    with _lock:
        if type(module) is LazyPackage:
            module.__class__ = ModuleType  # type: ignore[assignment]
            assert module.__spec__ is not None
            assert module.__spec__.loader is not None
            module.__spec__.loader.exec_module(module)


def import_lazily(packages: Iterable[str] = HEAVY, functions: Mapping[str, str] = FUNCTIONS) -> None:
    """Make packages lazy, unless they are imported already or not installed.

    For a process of rlkit's own only: what else runs in it sees packages that have done nothing yet.

    Args:
        packages: Their names.
        functions: A function of each of some submodules, which can be imported without its submodule's code.
    """
    for name in packages:
        module = _lazy(name)
        if module is not None:
            module.__version__ = metadata.version(name)  # type: ignore[attr-defined]
    for name, function in functions.items():
        module = _lazy(name) if name.partition(".")[0] in sys.modules else None
        if module is not None:
            setattr(module, function, _called_late(module, function))


def _lazy(name: str) -> ModuleType | None:
    """Return a new lazy package; None if it is imported already or not installed."""
    spec = None if name in sys.modules else find_spec(name)
    if spec is None:
        return None
    module = module_from_spec(spec)
    module.__class__ = LazyPackage
    sys.modules[name] = module
    return module


def _called_late(module: ModuleType, name: str) -> Callable[..., Any]:
    """Return a function that runs its module's code when it is called, which puts the real one into its place."""

    def function(*args: Any, **options: Any) -> Any:
        _execute(module)
        return getattr(module, name)(*args, **options)

    return function


def require_package(package: str, supported: str, plugin: str) -> None:
    """Check the version of an installed package.

    Args:
        package: The name of its distribution.
        supported: Versions, such as `>=1.4,<2`.
        plugin: The distribution that adapts it.

    Raises:
        UnavailableError: It is not installed.
        RecipeError: The version is not supported.
    """
    remedy = f"pip install '{package}{supported}'"
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError as error:
        raise UnavailableError(f"{package} is not installed: {remedy}") from error
    if version not in SpecifierSet(supported):
        raise RecipeError(f"{package} is {version}, but {plugin} supports {supported}: {remedy}")

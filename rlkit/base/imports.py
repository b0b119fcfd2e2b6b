"""Packages: those that load much more than rlkit uses, and the versions that plugins adapt."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import metadata
from importlib.util import find_spec, module_from_spec
from threading import RLock
from types import ModuleType
from typing import Any

from packaging.specifiers import SpecifierSet

from rlkit.base.errors import RecipeError, UnavailableError

HEAVY = ("lightning", "torchmetrics")
"""`import lightning.fabric` also loads lightning.pytorch, and all of torchmetrics only to look at its version."""


class LazyPackage(ModuleType):
    """A package whose submodules can be imported; its own code runs when a name is asked for that it has not yet."""

    def __getattr__(self, name: str) -> Any:
        submodule = sys.modules.get(f"{self.__name__}.{name}")
        if submodule is not None:
            return submodule  # which is being imported
        with _lock:
            if type(self) is LazyPackage:
                self.__class__ = ModuleType  # type: ignore[assignment]
                assert self.__spec__ is not None
                assert self.__spec__.loader is not None
                self.__spec__.loader.exec_module(self)
        return getattr(self, name)


_lock = RLock()


def import_lazily(packages: Iterable[str] = HEAVY) -> None:
    """Make packages lazy, unless they are imported already or not installed.

    For a process of rlkit's own only: what else runs in it sees packages that have done nothing yet.
    """
    for name in packages:
        spec = None if name in sys.modules else find_spec(name)
        if spec is None:
            continue
        module = module_from_spec(spec)
        module.__class__ = LazyPackage
        module.__version__ = metadata.version(name)  # type: ignore[attr-defined]
        sys.modules[name] = module


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

"""The packages that plugins adapt, and the versions that they are made for."""

from __future__ import annotations

from importlib import metadata

from packaging.specifiers import SpecifierSet

from rlkit.base.errors import RecipeError, UnavailableError


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

"""Curricula; those that come with rlkit are in the package of the tasks."""

from rlkit.registry.shelf import attribute_of

__all__: list[str] = []

__getattr__ = attribute_of("curricula")

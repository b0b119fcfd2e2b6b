"""Loggers of metrics, all of packages that come with rlkit."""

from rlkit.registry.shelf import attribute_of

__all__: list[str] = []

__getattr__ = attribute_of("loggers")

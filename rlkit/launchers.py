"""Launchers of runs on clusters; without one, `rlkit fit` starts its processes on this machine."""

from rlkit.registry.shelf import attribute_of

__all__: list[str] = []

__getattr__ = attribute_of("launchers")

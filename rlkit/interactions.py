"""Simulated users; all that come with rlkit are in packages of the shelf."""

from rlkit.registry.shelf import attribute_of

__all__: list[str] = []

__getattr__ = attribute_of("interactions")

"""Tools that come with rlkit."""

from rlkit.tools.calculator import Calculator

__all__ = ["Calculator"]

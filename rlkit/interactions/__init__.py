"""Simulated users that come with rlkit."""

from rlkit.interactions.retry import Retry

__all__ = ["Retry"]

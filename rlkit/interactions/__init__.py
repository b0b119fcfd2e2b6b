"""Simulated users that come with rlkit."""

from rlkit.interactions.retry import Retry
from rlkit.interactions.router import InteractionRouter

__all__ = ["InteractionRouter", "Retry"]

"""Policy losses: one a file."""

from rlkit.losses.clip import ClipLoss

__all__ = ["ClipLoss"]

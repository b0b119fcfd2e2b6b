"""Advantage estimators: one a file."""

from rlkit.advantages.grpo import GRPO

__all__ = ["GRPO"]

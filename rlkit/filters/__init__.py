"""Group filters: one a file."""

from rlkit.filters.zero_signal import ZeroSignal

__all__ = ["ZeroSignal"]

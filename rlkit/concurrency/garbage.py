"""Memory that is no longer used: Python's collector of cycles, and what the C library keeps.

The collector looks through all objects again and again: a million where torch is loaded.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Leave cycles alone meanwhile: for the import of large libraries, which leaves none to speak of."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def lasting() -> Iterator[None]:
    """Leave what exists now out of collections meanwhile: for what is loaded and lives as long as a run."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def return_memory() -> None:
    """Return to the system what the C library keeps of memory that was freed: it keeps that of each thread apart."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)

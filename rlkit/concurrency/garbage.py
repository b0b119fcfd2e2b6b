"""Python's collector of cycles, which looks through all objects again and again: a million where torch is loaded."""

from __future__ import annotations

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

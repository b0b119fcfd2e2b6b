"""Memory that is no longer used: Python's collector of cycles, the C library's heap, and oneDNN's compiled kernels.

The collector looks through all objects again and again: a million where torch is loaded.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLD = 50_000
"""New objects after which the collector looks for cycles in a run, in which there are almost none; Python's 700 are
ten conversations."""

HEAP = ((-8, 1), (-1, 512 << 20), (-3, 32 << 20))
"""glibc's parameters M_ARENA_MAX, M_TRIM_THRESHOLD and M_MMAP_THRESHOLD (the most it takes), and their values."""

KERNELS = dict.fromkeys(("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), "512")
"""How many compiled kernels oneDNN and torch's wrapper of it keep, 1,024 by default: about 0.5 MB each."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Leave cycles alone meanwhile: for the import of large libraries, which creates almost no garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def permanent() -> Iterator[None]:
    """Leave cycles alone meanwhile, and what exists then until a run ends: for imports of a process of rlkit's own."""
    with uncollected():
        yield
        gc.freeze()


@contextmanager
def lasting() -> Iterator[None]:
    """Collect rarely meanwhile, and leave out what exists now: for what is loaded and lives as long as a run."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(THRESHOLD, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def reuse_memory() -> None:
    """Let all threads of this process allocate from one heap, which keeps up to 512 MiB that are free.

    Otherwise learning cannot use what sampling has freed, since glibc keeps a heap for each thread, and large tensors
    come from the system and go back to it, which zeroes their pages each time. Does nothing without glibc.

    oneDNN compiles kernels for each shape of a product, and keeps fewer than by default; call this before the first.
    """
    for name, count in KERNELS.items():
        os.environ.setdefault(name, count)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in HEAP:
            mallopt(parameter, value)

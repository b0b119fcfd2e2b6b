"""What a process does with memory that is no longer used."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref

import pytest

from rlkit.base import garbage
from rlkit.base.garbage import THRESHOLD, lasting

SCRIPT = """
import ctypes, resource, sys, threading
import torch
from rlkit.base.garbage import reuse_memory
if sys.argv[1] == "reuse":
    reuse_memory()
PR_SET_THP_DISABLE = 41  # pages of 4 KiB, whatever the machine prefers
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
def allocate():
    kept = [torch.ones(1 << 18) for _ in range(96)]  # 1 MiB each: a few small blocks that stay cost little
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(2):
    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
before = faults()
allocate()
print(faults() - before)
"""
PAGES = 96 * 256


def pages(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.stress
def test_what_one_thread_frees_another_uses_without_new_pages() -> None:
    assert pages("reuse") < PAGES / 4
    assert pages("leave") > PAGES / 2, "the C library does so itself: then `reuse_memory` can go"


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_a_run_collects_rarely_and_only_what_is_new() -> None:
    before = gc.get_threshold()
    with lasting():
        assert gc.get_threshold() == (THRESHOLD, *before[1:])
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_cycles_of_a_run_are_collected() -> None:
    with lasting():
        cycle = weakref.ref(Cycle())
        assert cycle() is not None
        objects = [Cycle() for _ in range(2 * THRESHOLD)]
    assert cycle() is None
    assert len(objects) == 2 * THRESHOLD


KERNELS = """
import ctypes, sys
import torch
from rlkit.base.garbage import reuse_memory
if sys.argv[1] == "reuse":
    reuse_memory()
class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena b c d e f g used free keep".split()]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Heap
def multiply(rows):
    for n in rows:
        torch.ops.mkldnn._linear_pointwise(torch.zeros(n, 16), weight, None, "none", [], "")
    return libc.mallinfo2().used >> 20
weight = torch.zeros(16, 16)
before = multiply(range(1, 600))
print(multiply(range(600, 900)) - before)
"""


@pytest.mark.slow
def test_onednn_keeps_no_more_than_512_compiled_kernels() -> None:
    """MB of the 600th to 900th, each of another number of rows."""
    environment = {name: value for name, value in os.environ.items() if name not in garbage.KERNELS}
    growth = []
    for mode in ("reuse", "leave"):
        command = [sys.executable, "-c", KERNELS, mode]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        growth.append(int(done.stdout))
    assert growth[0] < 10
    assert growth[1] > 50, "oneDNN does so itself: then `KERNELS` can go"

"""What a process does with memory that is no longer used."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import resource, sys, threading
import torch
from rlkit.base.garbage import reuse_memory
if sys.argv[1] == "reuse":
    reuse_memory()
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


def test_what_one_thread_frees_another_uses_without_new_pages() -> None:
    assert pages("reuse") < PAGES / 4
    assert pages("leave") > PAGES / 2, "the C library does so itself: then `reuse_memory` can go"

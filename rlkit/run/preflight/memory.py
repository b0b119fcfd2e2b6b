"""Memory in use, and its limit."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch

from rlkit.base.limits import limit_mb

CLOSE = 0.9
"""The fraction of the limit above which the run warns."""


def rss_mb() -> float:
    """Return the resident memory of this process in MiB; 0 if the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak_rss_mb() -> float:
    """Return the peak resident memory of this process, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def metrics(device: torch.device) -> dict[str, float]:
    """Return the host's and the device's memory in MiB with peaks, and the largest fraction of a limit.

    For a device, this is the peak of this process over the memory that other processes (such as an engine) leave to it.
    """
    sizes = {"rss_mb": rss_mb(), "peak_rss_mb": peak_rss_mb()}
    shares = [sizes["rss_mb"] / limit_mb()]
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        sizes["device_mb"] = torch.cuda.memory_allocated(device) / 2**20
        sizes["peak_device_mb"] = torch.cuda.max_memory_allocated(device) / 2**20
        other_processes = total - free - torch.cuda.memory_reserved(device)
        shares.append(torch.cuda.max_memory_allocated(device) / (total - other_processes))
    return {f"memory/{name}": value for name, value in sizes.items()} | {"memory/share": max(shares)}

"""Profiles of single steps: where the time and the memory went."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from rlkit.run.folder import of_rank, write_whole

ALLOCATIONS = 100_000
"""Of a GPU's allocations, so many of the last ones are in a snapshot."""

QUIET = ("KINETO_LOG_LEVEL", "6")
"""Without it torch's profiler prints its own beginning and end."""

OPERATORS = 40
"""So many operators are listed, those first that took most time of their own."""

Attempt = Callable[[str, Callable[[], object]], None]
"""Runs an optional action, whose failure is a warning, under a name."""


@contextmanager
def profiled(folder: Path, name: str, rank: int, attempt: Attempt) -> Iterator[None]:
    """Profile what runs within, in all threads of this process; leave the files in `folder`.

    Args:
        folder: Is created.
        name: What the files' names begin with.
        rank: This process's.
        attempt: Writes the files: the run goes on without them.
    """
    os.environ.setdefault(*QUIET)
    gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    if gpu:
        torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS)
    threads = _ExperimentalConfig(profile_all_threads=True)
    try:
        with profile(activities=activities, profile_memory=True, experimental_config=threads) as made:
            yield
        stem = folder / of_rank(name, rank)
        attempt(f"profile/{stem.name}", lambda: _write(made, stem, gpu))
    finally:
        if gpu:
            torch.cuda.memory._record_memory_history(enabled=None)


def _write(made: profile, stem: Path, gpu: bool) -> None:
    stem.parent.mkdir(exist_ok=True)
    trace = Path(f"{stem}.trace.json")
    try:
        made.export_chrome_trace(str(trace))
        with trace.open("rb") as source, gzip.open(f"{trace}.gz.partial", "wb", compresslevel=5) as target:
            shutil.copyfileobj(source, target)
        Path(f"{trace}.gz.partial").rename(f"{trace}.gz")
    finally:
        trace.unlink(missing_ok=True)
        Path(f"{trace}.gz.partial").unlink(missing_ok=True)
    by = "self_device_time_total" if gpu else "self_cpu_time_total"
    table = made.key_averages().table(sort_by=by, row_limit=OPERATORS)
    write_whole(Path(f"{stem}.txt"), table.encode())
    if gpu:
        torch.cuda.memory._dump_snapshot(f"{stem}.memory.pickle")  # type: ignore[no-untyped-call]

"""Profiles of single steps: time by operator, and memory; or NVTX ranges for Nsight Systems."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from rlkit.records.folder import of_rank, write_atomically
from rlkit.train.metrics import NVTX

ALLOCATIONS = 100_000
"""The last allocations on a GPU that a snapshot holds."""

QUIET = ("KINETO_LOG_LEVEL", "6")
"""The environment variable that silences torch's profiler."""

OPERATORS = 40
"""Operators that are listed, by the time that they took themselves."""

NO_GPU = "warning: profile.tool is nsight, which profiles GPUs, but this run has none; set it to torch"

Attempt = Callable[[str, Callable[[], object]], None]
"""Runs a named optional action; its failure is a warning."""


class NsightCapture:
    """Marks steps for `nsys profile --capture-range=cudaProfilerApi`: their phases are NVTX ranges.

    Args:
        steps: The steps to capture.
    """

    def __init__(self, steps: Container[int]) -> None:
        self.steps = steps

    def start(self, number: int) -> None:
        """Start the capture if the step is one of these."""
        if number in self.steps:
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
            NVTX.set(True)

    def stop(self) -> None:
        """Stop a capture that was started, once the step's checkpoint is saved."""
        if NVTX.get():
            NVTX.set(False)
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


@contextmanager
def profiled(folder: Path, name: str, rank: int, attempt: Attempt) -> Iterator[None]:
    """Profile the code within, in all threads of this process, and write files to `folder`.

    Args:
        folder: Folder of the files; created if it is missing.
        name: Prefix of the files' names.
        rank: This process's rank.
        attempt: Runs the function that writes the files; the run continues if that fails.
    """
    os.environ.setdefault(*QUIET)
    gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    if gpu:
        torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS)
    threads = _ExperimentalConfig(profile_all_threads=True)
    try:
        with profile(activities=activities, profile_memory=True, experimental_config=threads) as profiler:
            yield
        stem = folder / of_rank(name, rank)
        attempt(f"profile/{stem.name}", lambda: _write(profiler, stem, gpu))
    finally:
        if gpu:
            torch.cuda.memory._record_memory_history(enabled=None)


def _write(profiler: profile, stem: Path, gpu: bool) -> None:
    stem.parent.mkdir(exist_ok=True)
    trace = Path(f"{stem}.trace.json")
    try:
        profiler.export_chrome_trace(str(trace))
        with trace.open("rb") as source, gzip.open(f"{trace}.gz.partial", "wb", compresslevel=5) as target:
            shutil.copyfileobj(source, target)
        Path(f"{trace}.gz.partial").rename(f"{trace}.gz")
    finally:
        trace.unlink(missing_ok=True)
        Path(f"{trace}.gz.partial").unlink(missing_ok=True)
    sort_key = "self_device_time_total" if gpu else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=sort_key, row_limit=OPERATORS)
    write_atomically(Path(f"{stem}.txt"), table.encode())
    if gpu:
        torch.cuda.memory._dump_snapshot(f"{stem}.memory.pickle")  # type: ignore[no-untyped-call]

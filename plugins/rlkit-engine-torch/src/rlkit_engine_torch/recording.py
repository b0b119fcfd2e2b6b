"""Kernels that are recorded in CUDA graphs: one launch instead of some hundreds."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from operator import is_
from typing import Any
from weakref import ref

import torch
from torch import Tensor

Run = Callable[[], Tensor]
Record = Callable[[Run, Any], Run]
"""Records a function without running it, given an earlier recording whose memory it may use: see `Graph`."""


class Graph:
    """The kernels of a function, recorded without being run; a call launches them.

    Other threads may use the device while they are recorded.

    Args:
        run: Returns a tensor, which each call overwrites.
        before: A graph that is never called again, whose memory is reused.

    Raises:
        RuntimeError: The function does something that cannot be recorded.
    """

    def __init__(self, run: Run, before: Graph | None = None) -> None:
        self._graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        stream = side_stream(current.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            take_workspaces(current.device)
            pool = None if before is None else before._graph.pool()
            self._graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                self._output = run()
            finally:
                self._graph.capture_end()
        current.wait_stream(stream)

    def __call__(self) -> Tensor:
        """Launch the kernels; return the function's tensor."""
        self._graph.replay()
        return self._output


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream that steps are recorded on: a pool's memory is reused on its own stream only."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call, no-any-return]


def take_workspaces(device: torch.device) -> None:
    """Let cuBLAS allocate its workspaces for this thread and stream, or the pool of a graph would keep them."""
    x = torch.ones(8, 8, dtype=torch.bfloat16, device=device)
    torch.bmm(x[None], x[None])
    torch.addmm(x[0], x, x)  # cuBLASLt may have its own


class Replayed:
    """Runs a function, records it at the second call with the same tensors, and replays it for as long as they stay.

    Args:
        record: As in `GraphDecoder`.
    """

    def __init__(self, record: Record) -> None:
        self._record: Record | None = record
        self._inputs: list[ref[Tensor]] = []
        self._replay: Run | None = None
        self._stale: Run | None = None

    def __call__(self, run: Run, *inputs: Tensor) -> Tensor:
        """Run or replay `run`; return its tensor, which the next call overwrites.

        Args:
            run: Reads and writes tensors in place, and does not wait for the device.
            inputs: Those of its tensors that may be others at the next call.
        """
        earlier = (reference() for reference in self._inputs)
        if len(inputs) != len(self._inputs) or not all(map(is_, inputs, earlier)):
            self._stale = self._replay or self._stale
            self._inputs, self._replay = [ref(x) for x in inputs], None
            return run()
        if self._replay is not None:
            return self._replay()
        output = run()
        if self._record is not None:
            try:
                self._replay, self._stale = self._record(run, self._stale), None
            except RuntimeError as error:
                warn_of(error)
                self._record = None
        return output


def warn_of(problem: object) -> None:
    """Warn that steps are not recorded, with the first line of the problem."""
    line = str(problem).partition("\n")[0]
    warnings.warn(f"decode steps are not recorded in CUDA graphs: {line}", stacklevel=3)

"""Decode steps recorded in CUDA graphs: one launch per step instead of some hundreds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlkit.models.vision import RowMedia
from rlkit_engine_torch.fused import FusedDecoder
from rlkit_engine_torch.prefixes import Prefix

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM

COLUMNS = 128
"""A recorded step reads a multiple of this many columns of the cache."""

EAGER = 0
"""Steps of the same rows and columns that are run before the one that is recorded, which is run first too: it loads
kernels.
"""

MAX_GAP = 0.05
"""The largest accepted distance of a replayed step's logits from those of the step itself, in standard deviations."""

Run = Callable[[], Tensor]


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


class GraphDecoder(FusedDecoder):
    """A `FusedDecoder` that records a step, and replays it while its rows, prompts and columns stay the same.

    A step reads and writes memory at fixed addresses, and counts positions there: nothing waits for the host. If a step
    cannot be recorded, or a replay differs from the step itself, steps are no longer recorded.

    Args:
        model: As in `FusedDecoder`.
        autocast: As in `FusedDecoder`.
        record: Records a step, given the last recording: see `Graph`.
    """

    spare = 1 / 4  # on a GPU a step of fewer rows is hardly faster, and must be recorded anew
    refill = 1 / 8  # as must one of other rows
    few_sizes = False

    def __init__(
        self,
        model: CausalLM,
        autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
        record: Callable[[Run, Any], Run] = Graph,
    ) -> None:
        self._record: Callable[[Run, Any], Run] | None = record
        self._replay: Run | None = None
        self._stale: Run | None = None
        """The last recording, unless it is `_replay`."""
        self._runs = 0
        self._columns = 0
        self._steps = 0
        self._replays = 0
        self._tokens: Tensor
        super().__init__(model, autocast)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Add a token [R] to each row and return the next logits [R,V], which the next step overwrites."""
        self._steps += 1
        if self._record is None:
            return super().step(tokens)
        if self.width + 1 > self._columns:
            self._forget()
            self._columns = -(-(self.width + 1) // COLUMNS) * COLUMNS
        if self._runs == 0:
            self._fix()
        self._tokens.copy_(tokens)
        self.end += 1
        self._runs += 1
        if self._replay is not None:
            self._replays += 1
            return self._replay()
        logits = self._run()
        if self._runs > EAGER and logits.isfinite().any():  # else there is nothing to compare
            self._try_record(logits)
        return logits

    def admit(
        self,
        prompts: Sequence[Sequence[int]],
        copies: Sequence[int],
        own: Sequence[Sequence[int]] = (),
        media: RowMedia = (),
        prefixes: Sequence[Prefix] = (),
    ) -> Tensor:
        """Run the prompts, add `copies[i]` rows for each, in order, and return the rows' next logits [N,V]."""
        self._forget()
        return super().admit(prompts, copies, own, media, prefixes)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the rows at these indices; drop all others, and the prompts that no row uses."""
        self._forget()
        super().keep(rows)

    def release(self) -> None:
        """Drop all rows and release their memory."""
        self._forget()
        self._stale = None
        super().release()

    def refresh(self) -> None:
        """Drop the copies of the weights: the weights have changed, or nothing is decoded for now."""
        self._forget()
        super().refresh()

    def health(self) -> dict[str, float]:
        return super().health() | {"recorded": self._replays / max(self._steps, 1)}

    def _forget(self) -> None:
        """Stop replaying the recorded step, whose inputs have changed."""
        self._stale = self._replay or self._stale
        self._replay = None
        self._runs = 0
        self._columns = 0

    def _fix(self) -> None:
        """Allocate a step's inputs at fixed addresses."""
        for layer in self.layers:
            layer.reserve(self.rows, self._columns)
        self._tokens = torch.empty(self.rows, dtype=torch.long, device=self.device)
        self._positions = self.positions()
        self._last = self._negative_starts + self.end

    def _run(self) -> Tensor:
        """Run a step on the inputs of `_fix`."""
        logits = self._pass(self._tokens, self._positions, self._last, self._columns)
        self._positions += 1
        self._last += 1
        return logits

    def _try_record(self, logits: Tensor) -> None:
        """Record the step that has just been run, and check that a replay returns the same logits."""
        assert self._record is not None
        try:
            replay = self._record(self._run, self._stale)
            self._positions -= 1
            self._last -= 1
            finite = logits.isfinite()  # a row whose logits are not finite fails by itself
            gap = float((replay() - logits)[finite].float().square().mean().sqrt() / logits[finite].float().std())
            problem = None if gap <= MAX_GAP else f"a replay's logits are {gap:.2g} of their spread away"
        except RuntimeError as error:
            problem = str(error).partition("\n")[0]
        self._stale = None
        if problem is None:
            self._replay = replay
        else:
            warnings.warn(f"decode steps are not recorded in CUDA graphs: {problem}", stacklevel=2)
            self._record = None

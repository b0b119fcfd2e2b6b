"""Decode steps recorded in CUDA graphs: one launch instead of some hundred a step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rlkit.engines.torch.fused import FusedDecoder

COLUMNS = 64
"""Columns of the cache that a recorded step reads are a multiple of this."""

EAGER = 2
"""Steps of the same rows and columns that are run before one is recorded: kernels are loaded in the first."""

GAP = 0.05
"""How far a replayed step's logits may be from those of the same step run, as a share of their standard deviation."""

Run = Callable[[], Tensor]


class Graph:
    """The kernels that a function launches, recorded without being run; a call launches them.

    Other threads may use the device meanwhile.

    Args:
        run: Returns a tensor, which each call writes again.
        before: Another one, never called again, whose memory is used.

    Raises:
        RuntimeError: The function does something that cannot be recorded.
    """

    def __init__(self, run: Run, before: Graph | None = None) -> None:
        self._graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        beside = side_stream(current.device)
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            take_workspaces(current.device)
            pool = None if before is None else before._graph.pool()
            self._graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                self._found = run()
            finally:
                self._graph.capture_end()
        current.wait_stream(beside)

    def __call__(self) -> Tensor:
        """Launch the kernels; return the function's tensor."""
        self._graph.replay()
        return self._found


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream that steps are recorded on: a pool's memory is used again on its own stream alone."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call, no-any-return]


def take_workspaces(device: torch.device) -> None:
    """Let cuBLAS allocate its workspaces for this thread and stream: the pool of a graph would keep them."""
    x = torch.ones(8, 8, dtype=torch.bfloat16, device=device)
    torch.bmm(x[None], x[None])
    torch.addmm(x[0], x, x)  # cuBLASLt may have another


class GraphDecoder(FusedDecoder):
    """A `FusedDecoder` whose steps are recorded and replayed while its rows, prompts and columns stay what they are.

    A step reads and writes memory of fixed addresses, and counts positions there: nothing waits for the host. If a
    step cannot be recorded, or a replay differs from the step itself, steps are run as they are from then on.

    Args:
        model: As of `FusedDecoder`.
        autocast: As of `FusedDecoder`.
        record: Records a step, given what it recorded last: see `Graph`.
    """

    spare = 1 / 4  # a step of fewer rows is hardly faster on a GPU, and must be recorded anew

    def __init__(
        self,
        model: Any,
        autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
        record: Callable[[Run, Any], Run] = Graph,
    ) -> None:
        self._record: Callable[[Run, Any], Run] | None = record
        self._replay: Run | None = None
        self._stale: Run | None = None
        """What was recorded last, unless it is `_replay`."""
        self._runs = self._columns = 0
        self._steps = self._replays = 0
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
        if self._runs > EAGER:
            self._try_record(logits)
        return logits

    def admit(
        self, prompts: Sequence[Sequence[int]], copies: Sequence[int], own: Sequence[Sequence[int]] = ()
    ) -> Tensor:
        """Run the prompts, add `copies[i]` rows for each, in order, and return the rows' next logits [N,V]."""
        self._forget()
        return super().admit(prompts, copies, own)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows, and the prompts that no row has any more."""
        self._forget()
        super().keep(rows)

    def release(self) -> None:
        """Drop all rows and release their memory."""
        self._forget()
        self._stale = None
        super().release()

    def refresh(self) -> None:
        """Drop the copies of the weights, since these have changed or nothing is decoded for now."""
        self._forget()
        super().refresh()

    def health(self) -> dict[str, float]:
        return super().health() | {"recorded": self._replays / max(self._steps, 1)}

    def _forget(self) -> None:
        """Replay the recorded step no more: what it reads is not what it was."""
        self._stale, self._replay = self._replay or self._stale, None
        self._runs = self._columns = 0

    def _fix(self) -> None:
        """Put what a step reads where it stays."""
        for layer in self.layers:
            layer.room(self.rows, self._columns)
        self._tokens = torch.empty(self.rows, dtype=torch.long, device=self.device)
        self._positions = self.positions()
        self._last = self._ages + self.end

    def _run(self) -> Tensor:
        """Run a step on what `_fix` has put there."""
        logits = self._pass(self._tokens, self._positions, self._last, self._columns)
        self._positions += 1
        self._last += 1
        return logits

    def _try_record(self, logits: Tensor) -> None:
        """Record the step that has just been run, and replay it to see that it yields the same."""
        assert self._record is not None
        try:
            replay = self._record(self._run, self._stale)
            self._positions -= 1
            self._last -= 1
            finite = logits.isfinite()  # a row may have logits that are not, whose requests fail
            gap = float((replay() - logits)[finite].float().square().mean().sqrt() / logits[finite].float().std())
            problem = None if gap <= GAP else f"a replay's logits are {gap:.2g} of their spread away"
        except RuntimeError as error:
            problem = str(error).partition("\n")[0]
        self._stale = None
        if problem is None:
            self._replay = replay
        else:
            warnings.warn(f"decode steps are not recorded in CUDA graphs: {problem}", stacklevel=2)
            self._record = None

"""Decode steps recorded in CUDA graphs: one launch per step instead of some hundreds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlkit.models.vision import RowMedia
from rlkit_engine_torch.fused import FusedDecoder
from rlkit_engine_torch.prefixes import Prefix
from rlkit_engine_torch.recording import Graph, Record, Run, warn_of

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM

COLUMNS = 128
"""A recorded step reads a multiple of this many columns of the cache."""

MAX_GAP = 0.05
"""The largest accepted distance of a replayed step's logits from those of the step itself, in standard deviations."""


class GraphDecoder(FusedDecoder):
    """A `FusedDecoder` that records a step, and replays it while its rows, prompts and columns stay the same.

    A step reads and writes memory at fixed addresses, and counts positions there: nothing waits for the host. If a step
    cannot be recorded, or a replay differs from the step itself, steps are no longer recorded.

    Args:
        model: As in `FusedDecoder`.
        autocast: As in `FusedDecoder`.
        record: Records a step, given the last recording: see `Graph`.
    """

    spare = 1 / 2  # on a GPU a step of fewer rows is hardly faster, and must be recorded first
    refill = 1 / 8  # rows that wait are worth a recording
    few_sizes = False

    def __init__(
        self,
        model: CausalLM,
        autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
        record: Record = Graph,
    ) -> None:
        self.record = record
        self._replay: Run | None = None
        self._stale: Run | None = None
        """The last recording, unless it is `_replay`."""
        self._fixed = False
        """Whether a step's inputs are at the addresses of the next one."""
        self._columns = 0
        self._steps = 0
        self._replays = 0
        self._tokens: Tensor
        super().__init__(model, autocast)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Add a token [R] to each row and return the next logits [R,V], which the next step overwrites."""
        self._steps += 1
        if self.record is None:
            return super().step(tokens)
        if self.width + 1 > self._columns:
            self._forget()
            self._columns = -(-(self.width + 1) // COLUMNS) * COLUMNS
        if not self._fixed:
            self._fix()
        self._tokens.copy_(tokens)
        self.end += 1
        if self._replay is not None:
            self._replays += 1
            return self._replay()
        logits = self._run()
        if logits.isfinite().any():  # else there is nothing to compare
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
        self._fixed = False
        self._columns = 0

    def _fix(self) -> None:
        """Allocate a step's inputs at fixed addresses."""
        for layer in self.layers:
            layer.reserve(self.rows, self._columns)
        self._tokens = torch.empty(self.rows, dtype=torch.long, device=self.device)
        self._positions = self.positions()
        self._last = self._negative_starts + self.end
        self._fixed = True

    def _run(self) -> Tensor:
        """Run a step on the inputs of `_fix`."""
        logits = self._pass(self._tokens, self._positions, self._last, self._columns)
        self._positions += 1
        self._last += 1
        return logits

    def _try_record(self, logits: Tensor) -> None:
        """Record the step that has just been run, and check that a replay returns the same logits."""
        assert self.record is not None
        try:
            replay = self.record(self._run, self._stale)
            self._positions -= 1
            self._last -= 1
            finite = logits.isfinite()  # a row whose logits are not finite fails by itself
            gap = float((replay() - logits)[finite].float().square().mean().sqrt() / logits[finite].float().std())
            problem = None if gap <= MAX_GAP else f"a replay's logits are {gap:.2g} of their spread away"
        except RuntimeError as error:
            problem = str(error)
        self._stale = None
        if problem is None:
            self._replay = replay
        else:
            warn_of(problem)
            self.record = None

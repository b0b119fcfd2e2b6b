"""The embedded engine: samples from the trainer's own weights."""

from __future__ import annotations

import asyncio
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlkit.errors import EngineError
from rlkit.interfaces.engine import RolloutEngine
from rlkit.ops.batching import micro_batches
from rlkit.ops.random import uniform
from rlkit.ops.sampling import choose
from rlkit.ranges import Count, PositiveInt
from rlkit.types import Completion, Request, StopReason

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime, WeightStream

PREFILL_TOKENS = 16384
ALIVE = 0.85
"""Finished rows are dropped once no more than this share of all rows is alive."""


@dataclass(eq=False)
class _Row:
    """A request on its way."""

    request: Request
    budget: int
    stop_ids: frozenset[int]
    future: asyncio.Future[Completion]
    key: int
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    finished: StopReason | None = None

    def add(self, token: int, logp: float) -> None:
        """Take a sampled token; sets `finished` where it is the last."""
        if self.finished is not None:
            return
        self.tokens.append(token)
        self.logps.append(logp)
        if token in self.stop_ids:
            self.finished = StopReason.STOP
        elif len(self.tokens) >= self.budget:
            whole = self.budget == self.request.sampling.max_tokens
            self.finished = StopReason.LENGTH if whole else StopReason.CONTEXT
        elif self.future.done():  # cancelled, or past its deadline
            self.finished = StopReason.ERROR


class TorchEngine(RolloutEngine):
    """Continuous batching over the policy in this process: no server, no second copy, nothing to sync.

    Requests that arrived between two decode steps join the batch; equal prompts are run once. A sampled token
    depends on its request's key and position only, whatever else is in the batch (but for floating-point noise).
    Log-probs are those of the full softmax at the request's temperature, truncated or not.

    Args:
        max_rows: Requests in the batch at once; others wait.
        max_kv_tokens: Bound of the key-value cache, as rows times the longest row.
    """

    reads_policy = True

    def __init__(self, max_rows: Count = 256, max_kv_tokens: PositiveInt = 262144) -> None:
        self.max_rows = max_rows
        self.max_kv_tokens = max_kv_tokens
        self.version = 0
        self._waiting: deque[_Row] = deque()
        self._loop: asyncio.Task[None] | None = None
        self._peak = 0

    def bind(self, runtime: Runtime) -> None:
        from rlkit.engines.torch.decoder import Decoder, why_not

        if runtime.tensor_parallel > 1:
            raise EngineError(
                f"TorchEngine cannot sample from a policy under tensor_parallel={runtime.tensor_parallel}: each token "
                "would wait for other ranks; choose rollout.engine: SGLangServer, or tensor_parallel: 1"
            )
        self._runtime = runtime
        self._stop_ids = runtime.stop_ids
        with runtime.unsharded():
            reason = why_not(runtime.policy)
            self._decoder = Decoder(runtime.policy, runtime.autocast) if reason is None else None
        if reason is not None:
            warnings.warn(
                "TorchEngine samples through transformers' generate, prompts of one length at a time, which is slow: "
                f"its own decoder does not know {type(runtime.policy).__name__}: {reason}",
                stacklevel=2,
            )

    def awake(self) -> AbstractContextManager[None]:
        return self._runtime.unsharded()

    async def generate(self, request: Request) -> Completion:
        room = self._runtime.context - len(request.tokens)
        if room <= 0:
            return Completion([], [], [], StopReason.CONTEXT)
        if not request.tokens:
            raise EngineError("TorchEngine was given no tokens to continue, expected at least one")
        budget = min(request.sampling.max_tokens, room)
        stop_ids = self._stop_ids.union(request.sampling.stop_ids)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Row(request, budget, stop_ids, future, request.key.hash()))
        if self._loop is None or self._loop.done():
            run = self._run_batches if self._decoder is None else self._run
            self._loop = asyncio.create_task(self._guard(run))
        return await asyncio.wait_for(future, request.deadline)

    async def sync(self, stream: WeightStream, version: int) -> None:
        self.version = version

    def health(self) -> dict[str, float]:
        return {"rows_peak": float(self._peak), "slow_path": float(self._decoder is None)}

    def close(self) -> None:
        if self._loop is not None and not self._loop.done():
            self._loop.cancel()

    async def _guard(self, run: Any) -> None:
        rows: list[_Row] = []
        try:
            await run(rows)
        except Exception as error:  # whoever waits must hear of it
            failure = EngineError(f"TorchEngine failed with {type(error).__name__}: {error}")
            failure.__cause__ = error
            for row in (*rows, *self._waiting):
                if not row.future.done():
                    row.future.set_exception(failure)
            self._waiting.clear()
        finally:
            if self._decoder is not None:
                self._decoder.release()

    async def _run(self, rows: list[_Row]) -> None:
        """Decode until nobody waits: admit, step, hand over what is finished."""
        assert self._decoder is not None
        await asyncio.sleep(0)
        with _eval(self._runtime.policy):
            while rows or self._waiting:
                if joined := self._admissible(rows):
                    self._admit(rows, joined)
                self._compact(rows)
                if rows:
                    last = torch.tensor([row.tokens[-1] for row in rows], device=self._runtime.device)
                    positions = self._decoder.positions()
                    self._take(rows, self._decoder.step(last), positions + 1)
                await asyncio.sleep(0)

    def _admissible(self, rows: Sequence[_Row]) -> list[_Row]:
        joined: list[_Row] = []
        widest = max((len(r.request.tokens) + r.budget for r in rows), default=0)
        while self._waiting and len(rows) + len(joined) < self.max_rows:
            row = self._waiting[0]
            widest = max(widest, len(row.request.tokens) + row.budget)
            count = len(rows) + len(joined) + 1
            if count > 1 and count * widest > self.max_kv_tokens:
                break
            joined.append(self._waiting.popleft())
        return joined

    def _admit(self, rows: list[_Row], joined: Sequence[_Row]) -> None:
        """Run each distinct prompt once and sample the first token of each row."""
        assert self._decoder is not None
        same: dict[tuple[int, ...], list[_Row]] = {}
        for row in joined:
            same.setdefault(row.request.tokens, []).append(row)
        prompts = list(same)
        for chunk in micro_batches([len(p) for p in prompts], PREFILL_TOKENS):
            chosen = [prompts[i] for i in chunk]
            new = [row for prompt in chosen for row in same[prompt]]
            logits = self._decoder.admit(chosen, [len(same[p]) for p in chosen])
            lengths = torch.tensor([len(row.request.tokens) for row in new], device=logits.device)
            rows.extend(new)
            self._take(new, logits, lengths)
        self._peak = max(self._peak, len(rows))

    def _take(self, rows: Sequence[_Row], logits: Tensor, positions: Tensor) -> None:
        """Sample the token at each row's position [R]."""
        tokens, logps = self._choose(rows, logits, positions)
        for row, token, logp in zip(rows, tokens.tolist(), logps.tolist(), strict=True):
            row.add(token, logp)

    def _choose(self, rows: Sequence[_Row], logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        sampling = [row.request.sampling for row in rows]
        keys = torch.tensor([row.key for row in rows], device=logits.device)
        return choose(
            logits,
            uniform(keys, positions),
            torch.tensor([s.temperature for s in sampling], device=logits.device),
            torch.tensor([s.top_p for s in sampling], device=logits.device),
            torch.tensor([s.top_k for s in sampling], device=logits.device),
        )

    def _compact(self, rows: list[_Row]) -> None:
        """Answer the finished rows; drop them from the cache when they have become many."""
        assert self._decoder is not None
        alive = []
        for i, row in enumerate(rows):
            if row.finished is None:
                alive.append(i)
            else:
                self._answer(row)
        few = len(alive) <= ALIVE * len(rows) or bool(self._waiting)
        if few and len(alive) < len(rows):
            self._decoder.keep(alive)
            rows[:] = [rows[i] for i in alive]

    def _answer(self, row: _Row) -> None:
        assert row.finished is not None
        if not row.future.done():
            versions = [self.version] * len(row.tokens)
            row.future.set_result(Completion(row.tokens, row.logps, versions, row.finished))

    async def _run_batches(self, rows: list[_Row]) -> None:
        """Serve models without a plain cache: batches of prompts of one length, through `generate`."""
        from rlkit.engines.torch.generate import generate

        await asyncio.sleep(0)
        with _eval(self._runtime.policy):
            while self._waiting:
                length = len(self._waiting[0].request.tokens)
                rows[:] = [row for row in self._waiting if len(row.request.tokens) == length][: self.max_rows]
                self._waiting = deque(row for row in self._waiting if row not in rows)

                def select(logits: Tensor, count: int, start: int = length) -> tuple[Tensor, Tensor, Tensor]:
                    positions = torch.full((len(rows),), start + count, device=logits.device)
                    tokens, logps = self._choose(rows, logits, positions)
                    for row, token, logp in zip(rows, tokens.tolist(), logps.tolist(), strict=True):
                        row.add(token, logp)
                    finished = torch.tensor([row.finished is not None for row in rows], device=logits.device)
                    return tokens, logps, finished

                budget = max(row.budget for row in rows)
                prompts = [row.request.tokens for row in rows]
                generate(self._runtime.policy, prompts, select, budget, self._runtime.autocast())
                for row in rows:
                    self._answer(row)
                rows.clear()
                await asyncio.sleep(0)


@contextmanager
def _eval(model: Any) -> Iterator[None]:
    """Sample without dropout, whatever mode the trainer left the model in."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)

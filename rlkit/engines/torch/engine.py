"""The embedded engine: samples from the trainer's own weights."""

from __future__ import annotations

import asyncio
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from rlkit.distributed.kernels import choose_kernels
from rlkit.distributed.offload import use_device
from rlkit.errors import EngineError
from rlkit.interfaces.engine import RolloutEngine
from rlkit.ops.batching import micro_batches
from rlkit.ops.random import uniform
from rlkit.ops.sampling import Truncation, choose
from rlkit.ranges import Count, PositiveInt
from rlkit.types import Completion, Request, StopReason

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime, WeightStream

T = TypeVar("T")

PREFILL_TOKENS = 16384
"""Tokens of one prefill pass, padding included."""
ALIVE = 0.85
"""Finished rows are dropped once no more than this share of all rows is alive."""


@dataclass(eq=False)
class _Row:
    """A request in progress."""

    request: Request
    budget: int
    stop_ids: frozenset[int]
    future: asyncio.Future[Completion]
    key: int
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finished: StopReason | None = None

    def add(self, token: int, logp: float, version: int) -> bool:
        """Append a sampled token; return whether it is the last, for which it sets `finished`."""
        if self.finished is not None:
            return False
        self.tokens.append(token)
        self.logps.append(logp)
        self.versions.append(version)
        if token in self.stop_ids:
            self.finished = StopReason.STOP
        elif len(self.tokens) >= self.budget:
            whole = self.budget == self.request.sampling.max_tokens
            self.finished = StopReason.LENGTH if whole else StopReason.CONTEXT
        elif self.future.done():  # cancelled, or past its deadline
            self.finished = StopReason.ERROR
        return self.finished is not None

    def answer(self) -> None:
        """Resolve the future with what was sampled, unless it was cancelled."""
        assert self.finished is not None
        if not self.future.done():
            self.future.set_result(Completion(self.tokens, self.logps, self.versions, self.finished))


class TorchEngine(RolloutEngine):
    """Continuous batching over the policy in this process: no server, no second copy, nothing to sync.

    Requests that arrived between two decode steps join the batch; equal prompts are run once. A sampled token
    depends on its request's key and position only, whatever else is in the batch (but for floating-point noise).
    Log-probs are those of the full softmax at the request's temperature, truncated or not. The model runs in one
    worker thread, so that a decode step never blocks the event loop.

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
        self._server: asyncio.Task[None] | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._pending: deque[None] = deque()
        """One entry for each call that waits in the worker's queue until the step in progress is over."""
        self._peak = 0
        self._limited: list[_Row] = []
        self._limits: list[Tensor] = []

    @property
    def capacity(self) -> int:
        return self.max_rows

    def bind(self, runtime: Runtime) -> None:
        from rlkit.engines.torch.blocks import fusible
        from rlkit.engines.torch.decoder import Decoder, why_not
        from rlkit.engines.torch.fused import FusedDecoder
        from rlkit.engines.torch.graphs import GraphDecoder

        if runtime.tensor_parallel > 1:
            raise EngineError(
                f"TorchEngine cannot sample from a policy under tensor_parallel={runtime.tensor_parallel}: each token "
                "would wait for other ranks; choose rollout.engine: SGLangServer, or tensor_parallel: 1"
            )
        choose_kernels()  # this process may be a server's, without a trainer
        self._runtime = runtime
        self._stop_ids = runtime.stop_ids
        with runtime.unsharded():
            reason = why_not(runtime.policy)
            fused = GraphDecoder if runtime.device.type == "cuda" else FusedDecoder
            make = fused if fusible(runtime.policy) and not why_not(runtime.policy, FusedDecoder) else Decoder
            self._decoder = make(runtime.policy, runtime.autocast) if reason is None else None
        if reason is not None:
            warnings.warn(
                "TorchEngine samples through transformers' generate, prompts of one length at a time, which is slow: "
                f"its own decoder does not support {type(runtime.policy).__name__}: {reason}",
                stacklevel=2,
            )
        self._worker = ThreadPoolExecutor(1, "rlkit-decode", use_device, (runtime.device,))

    @contextmanager
    def on_device(self) -> Iterator[None]:
        with self._runtime.unsharded():
            try:
                yield
            finally:  # after an error, a step may be in progress
                self._submit(self._refresh).result()

    async def generate(self, request: Request) -> Completion:
        room = self._runtime.context - len(request.tokens)
        if room <= 0:
            return Completion([], [], [], StopReason.CONTEXT)
        if not request.tokens:
            raise EngineError("TorchEngine received a request without tokens, expected at least one")
        budget = min(request.sampling.max_tokens, room)
        stop_ids = self._stop_ids.union(request.sampling.stop_ids)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Row(request, budget, stop_ids, future, request.key.hash()))
        if self._server is None or self._server.done():
            self._server = asyncio.create_task(self._serve())
        async with asyncio.timeout(request.deadline):
            return await future

    async def sync(self, stream: WeightStream, version: int) -> None:
        await self.between_steps(partial(self._set_version, version))

    async def between_steps(self, work: Callable[[], T]) -> T:
        """Call a function in the worker thread, before the next decode step: weights may be written there."""
        return await asyncio.wrap_future(self._submit(work))

    def _set_version(self, version: int) -> None:
        self.version = version
        self._refresh()

    def _refresh(self) -> None:
        if self._decoder is not None:
            self._decoder.refresh()

    def health(self) -> dict[str, float]:
        return {"rows_peak": float(self._peak), "slow_path": float(self._decoder is None)}

    def close(self) -> None:
        if self._worker is not None:
            self._worker.shutdown(cancel_futures=True)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        def call() -> T:
            self._pending.pop()
            return work()

        assert self._worker is not None
        self._pending.append(None)
        return self._worker.submit(call)

    async def _serve(self) -> None:
        """Answer requests until none waits; a failure is raised in all that do."""
        rows: list[_Row] = []
        joined: list[_Row] = []
        work = self._decode if self._decoder is not None else self._generate
        select = self._admissible if self._decoder is not None else self._of_one_length
        try:
            await asyncio.sleep(0)  # requests of one moment are admitted together
            with _eval(self._runtime.policy):
                while rows or self._waiting:
                    joined = select(rows)
                    for row in await self._in_worker(partial(work, rows, joined)):
                        row.answer()
        except Exception as error:
            failure = EngineError(f"TorchEngine failed with {type(error).__name__}: {error}")
            failure.__cause__ = error
            for row in (*rows, *joined, *self._waiting):
                if not row.future.done():
                    row.future.set_exception(failure)
            self._waiting.clear()
        finally:
            if self._decoder is not None:
                self._decoder.release()

    async def _in_worker(self, work: Callable[[], T]) -> T:
        """Run work in the worker thread; a cancelled caller goes on only after the step in progress."""
        try:
            return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._worker, work))
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.wrap_future(self._submit(_nothing)))
            raise

    def _decode(self, rows: list[_Row], joined: Sequence[_Row]) -> list[_Row]:
        """Admit rows and decode until a row ends, others wait to join, or a call does; return the rows that ended.

        Runs in the worker thread, as all below that calls the model.
        """
        assert self._decoder is not None
        ended = self._admit(rows, joined)
        while rows and not ended:
            last = torch.tensor([row.tokens[-1] for row in rows], device=self._runtime.device)
            positions = self._decoder.positions()
            ended = self._sample(rows, self._decoder.step(last), positions + 1)
            if self._waiting or self._pending:
                break
        self._compact(rows)
        return ended

    def _admissible(self, rows: Sequence[_Row]) -> list[_Row]:
        joined: list[_Row] = []
        widest = max((len(r.request.tokens) + r.budget for r in rows), default=0)
        while self._waiting and len(rows) + len(joined) < self.max_rows:
            row = self._waiting[0]
            if row.future.done():  # cancelled, or past its deadline
                self._waiting.popleft()
                continue
            widest = max(widest, len(row.request.tokens) + row.budget)
            count = len(rows) + len(joined) + 1
            if count > 1 and count * widest > self.max_kv_tokens:
                break
            joined.append(self._waiting.popleft())
        return joined

    def _of_one_length(self, rows: Sequence[_Row]) -> list[_Row]:
        """Return rows whose prompts are of one length, for `generate`."""
        length = len(self._waiting[0].request.tokens)
        joined = [row for row in self._waiting if len(row.request.tokens) == length][: self.max_rows]
        self._waiting = deque(row for row in self._waiting if row not in joined)
        return [row for row in joined if not row.future.done()]

    def _admit(self, rows: list[_Row], joined: Sequence[_Row]) -> list[_Row]:
        """Run each distinct prompt once and sample the first token of each row; return the rows that ended."""
        assert self._decoder is not None
        same: dict[tuple[int, ...], list[_Row]] = {}
        for row in joined:
            same.setdefault(row.request.tokens, []).append(row)
        prompts, ended = list(same), []
        for chunk in micro_batches([len(p) for p in prompts], PREFILL_TOKENS):
            chosen = [prompts[i] for i in chunk]
            new = [row for prompt in chosen for row in same[prompt]]
            logits = self._decoder.admit(chosen, [len(same[p]) for p in chosen])
            lengths = torch.tensor([len(row.request.tokens) for row in new], device=logits.device)
            rows.extend(new)
            ended += self._sample(new, logits, lengths)
        self._peak = max(self._peak, len(rows))
        return ended

    def _sample(self, rows: Sequence[_Row], logits: Tensor, positions: Tensor) -> list[_Row]:
        """Sample the token at each row's position [R]; return the rows that ended with it."""
        return self._add(rows, *self._choose(rows, logits, positions))

    def _add(self, rows: Sequence[_Row], tokens: Tensor, logps: Tensor) -> list[_Row]:
        sampled = zip(rows, tokens.tolist(), logps.tolist(), strict=True)
        return [row for row, token, logp in sampled if row.add(token, logp, self.version)]

    def _choose(self, rows: Sequence[_Row], logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self._limited != [*rows]:  # rows come and go more rarely than they are sampled
            self._limited, self._limits = [*rows], _limits(rows, logits.device)
        keys, temperature, *limits = self._limits
        return choose(logits, uniform(keys, positions), temperature, Truncation(*limits))

    def _compact(self, rows: list[_Row]) -> None:
        """Drop finished rows from the cache once there are many, or as soon as others wait."""
        assert self._decoder is not None
        alive = [i for i, row in enumerate(rows) if row.finished is None]
        few = len(alive) <= ALIVE * len(rows) or bool(self._waiting)
        if few and len(alive) < len(rows):
            self._decoder.keep(alive)
            rows[:] = [rows[i] for i in alive]

    def _generate(self, rows: list[_Row], joined: Sequence[_Row]) -> Sequence[_Row]:
        """Sample rows of a model without a plain cache to their ends; `rows` stays empty."""
        from rlkit.engines.torch.generate import generate

        if not joined:
            return joined
        start = len(joined[0].request.tokens)

        def select(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
            tokens, logps = self._choose(
                joined, logits, torch.full((len(joined),), start + count, device=logits.device)
            )
            self._add(joined, tokens, logps)
            return tokens, logps, torch.tensor([row.finished is not None for row in joined], device=logits.device)

        prompts = [row.request.tokens for row in joined]
        generate(self._runtime.policy, prompts, select, max(row.budget for row in joined), self._runtime.autocast())
        return joined


def _limits(rows: Sequence[_Row], device: torch.device) -> list[Tensor]:
    """Return the keys, temperatures and truncations of rows, each [R]."""
    values = ((row.key, s.temperature, s.top_p, s.top_k, s.min_p) for row in rows for s in [row.request.sampling])
    return [torch.tensor(column, device=device) for column in zip(*values, strict=True)]


def _nothing() -> None: ...


@contextmanager
def _eval(model: nn.Module) -> Iterator[None]:
    """Sample without dropout, whatever mode the trainer left the model in."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)

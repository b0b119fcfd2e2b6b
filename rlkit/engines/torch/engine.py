"""The embedded engine: samples from the trainer's own weights."""

from __future__ import annotations

import asyncio
import warnings
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from rlkit.concurrency.garbage import reuse_memory
from rlkit.distributed.kernels import choose_kernels
from rlkit.distributed.offload import use_device
from rlkit.engines.torch.batch import Batch, Row, by_prompt
from rlkit.errors import EngineError
from rlkit.interfaces.engine import RolloutEngine
from rlkit.ops.batching import micro_batches
from rlkit.ranges import Count, PositiveInt
from rlkit.types import Completion, Request, StopReason

if TYPE_CHECKING:
    from rlkit.engines.torch.decoder import AnyDecoder
    from rlkit.interfaces.runtime import Runtime, WeightStream

T = TypeVar("T")

COPIES = 0.25
"""The largest share of a GPU's memory for copies of the weights: larger models are sampled through their modules."""

PREFILL_TOKENS = 16384
"""Tokens of one prefill pass, padding included."""


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
    interruptible = True

    def __init__(self, max_rows: Count = 256, max_kv_tokens: PositiveInt = 262144) -> None:
        self.max_rows = max_rows
        self.max_kv_tokens = max_kv_tokens
        self.version = 0
        self._waiting: deque[Row] = deque()
        self._server: asyncio.Task[None] | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._pending: deque[None] = deque()
        """One entry for each call that waits in the worker's queue until the step in progress is over."""
        self._peak = 0
        self._interrupting = False
        self._calm: Callable[[], Awaitable[None]] | None = None

    @property
    def capacity(self) -> int:
        return self.max_rows

    def bind(self, runtime: Runtime) -> None:
        if runtime.tensor_parallel > 1:
            raise EngineError(
                f"TorchEngine cannot sample from a policy under tensor_parallel={runtime.tensor_parallel}: each token "
                "would wait for other ranks; choose rollout.engine: SGLangServer, or tensor_parallel: 1"
            )
        reuse_memory()
        choose_kernels()  # this process may be a server's, without a trainer
        self._runtime = runtime
        self._batch = Batch(runtime.device)
        self._stop_ids = runtime.stop_ids
        with runtime.unsharded():
            self._decoder = _make_decoder(runtime)
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
        future.add_done_callback(self._note)
        self._waiting.append(Row(request, budget, stop_ids, future, request.key.hash()))
        if self._server is None or self._server.done():
            self._interrupting = False
            self._server = asyncio.create_task(self._serve())
        async with asyncio.timeout(request.deadline):
            return await future

    def interrupt(self) -> None:
        self._interrupting = self._server is not None and not self._server.done()

    def follow(self, calm: Callable[[], Awaitable[None]]) -> None:
        self._calm = calm

    def _note(self, future: asyncio.Future[Completion]) -> None:
        self._batch.cancelled |= future.cancelled()

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
        gauges = {"fused": 0.0} if self._decoder is None else self._decoder.health()
        return {"rows_peak": float(self._peak), "slow_path": float(self._decoder is None), **gauges}

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
        self._batch = batch = Batch(self._runtime.device)
        joined: list[Row] = []
        work = self._decode if self._decoder is not None else self._generate
        select = self._admissible if self._decoder is not None else self._of_one_length
        try:
            await asyncio.sleep(0)  # requests of one moment are admitted together
            with _eval(self._runtime.policy):
                while batch.rows or self._waiting:
                    if self._calm is not None:
                        await asyncio.sleep(0)  # those that were answered are busy from now on
                        await self._calm()
                        self._waiting = deque(sorted(self._waiting, key=_turn))
                    if self._interrupting:
                        await self._end(batch)
                        continue
                    joined = select(batch.rows)
                    for row in await self._in_worker(partial(work, batch, joined)):
                        row.answer()
        except Exception as error:
            failure = EngineError(f"TorchEngine failed with {type(error).__name__}: {error}")
            failure.__cause__ = error
            for row in (*batch.rows, *joined, *self._waiting):
                if not row.future.done():
                    row.future.set_exception(failure)
            self._waiting.clear()
        finally:
            if self._decoder is not None:
                self._decoder.release()

    async def _end(self, batch: Batch) -> None:
        """Answer all requests as they are."""
        self._interrupting = False
        waiting, self._waiting = list(self._waiting), deque()
        for row in waiting:
            row.completion = Completion([], [], [], StopReason.INTERRUPTED)

        def end() -> list[Row]:
            ended = batch.interrupt()
            self._compact(batch)
            return ended

        for row in (*await self._in_worker(end), *waiting):
            row.answer()

    async def _in_worker(self, work: Callable[[], T]) -> T:
        """Run work in the worker thread; a cancelled caller goes on only after the step in progress."""
        try:
            return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._worker, work))
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.wrap_future(self._submit(_nothing)))
            raise

    def _decode(self, batch: Batch, joined: Sequence[Row]) -> list[Row]:
        """Admit rows and decode until a row ends, others wait to join, or a call does; return the rows that ended.

        Runs in the worker thread, as all below that calls the model.
        """
        assert self._decoder is not None
        ended = self._admit(batch, joined)
        while batch.rows and not ended:
            ended = batch.sample(self._decoder.step(batch.last), self.version)
            if self._waiting or self._pending or self._interrupting:
                break
        self._compact(batch)
        return ended

    def _admissible(self, rows: Sequence[Row]) -> list[Row]:
        joined: list[Row] = []
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

    def _of_one_length(self, rows: Sequence[Row]) -> list[Row]:
        """Return rows whose prompts are of one length, for `generate`."""
        length = len(self._waiting[0].request.tokens)
        joined = [row for row in self._waiting if len(row.request.tokens) == length][: self.max_rows]
        self._waiting = deque(row for row in self._waiting if row not in joined)
        return [row for row in joined if not row.future.done()]

    def _admit(self, batch: Batch, joined: Sequence[Row]) -> list[Row]:
        """Run each distinct prompt once and sample the next token of each row; return the rows that ended."""
        assert self._decoder is not None
        groups, ended = by_prompt(joined, self._decoder.resumes, PREFILL_TOKENS), []
        for chunk in micro_batches([group.tokens for group in groups], PREFILL_TOKENS):
            chosen = [groups[i] for i in chunk]
            rows = [row for group in chosen for row in group.rows]
            own = [row.request.tokens[len(group.prompt) :] for group in chosen for row in group.rows]
            logits = self._decoder.admit([g.prompt for g in chosen], [len(g.rows) for g in chosen], own)
            first = len(batch.rows)
            batch.add(rows)
            ended += batch.sample(logits, self.version, first)
        self._peak = max(self._peak, len(batch.rows))
        return ended

    def _compact(self, batch: Batch) -> None:
        """Drop finished rows once there are many, or as soon as others wait; the last rows take their places."""
        assert self._decoder is not None
        alive = [i for i, row in enumerate(batch.rows) if not row.finished]
        count, everything = len(alive), len(batch.rows)
        if count == everything or (everything - count < self._decoder.spare * everything and not self._waiting):
            return
        tail = [i for i in alive if i >= count]
        kept = [i if not batch.rows[i].finished else tail.pop() for i in range(count)]
        self._decoder.keep(kept)
        batch.keep(kept)

    def _generate(self, batch: Batch, joined: Sequence[Row]) -> Sequence[Row]:
        """Sample rows of a model without a plain cache to their ends or an interruption; the batch stays empty."""
        from rlkit.engines.torch.generate import generate

        if not joined:
            return joined
        batch.add(joined)

        def select(logits: Tensor) -> tuple[Tensor, Tensor]:
            batch.sample(logits, self.version)
            done = [row.finished or self._interrupting for row in joined]
            return batch.last, torch.tensor(done, device=logits.device)

        prompts = [row.request.tokens for row in joined]
        try:
            generate(self._runtime.policy, prompts, select, max(row.budget for row in joined), self._runtime.autocast())
            batch.interrupt()
        finally:
            batch.keep([])
        return joined


def _make_decoder(runtime: Runtime) -> AnyDecoder | None:
    """Return the fastest decoder that supports the policy, or None for `generate`; warn of all but the fastest."""
    from rlkit.engines.torch.blocks import why_not_fused
    from rlkit.engines.torch.decoder import Decoder, why_not
    from rlkit.engines.torch.fused import FusedDecoder
    from rlkit.engines.torch.graphs import GraphDecoder

    policy, kind = runtime.policy, type(runtime.policy).__name__
    reason = why_not(policy)
    if reason is not None:
        warnings.warn(
            "TorchEngine samples through transformers' generate, prompts of one length at a time, which is slow: "
            f"its own decoder does not support {kind}: {reason}",
            stacklevel=3,
        )
        return None
    reason = why_not_fused(policy)
    if reason is None and not _has_room(runtime):
        reason = f"copies of its weights would take more than {COPIES:.0%} of the GPU's memory"
    reason = reason or why_not(policy, FusedDecoder)
    if reason is not None:
        warnings.warn(
            f"TorchEngine decodes through the modules of {kind}, which is slower than through fused copies of its "
            f"weights: {reason}",
            stacklevel=3,
        )
        return Decoder(policy, runtime.autocast)
    return (GraphDecoder if runtime.device.type == "cuda" else FusedDecoder)(policy, runtime.autocast)


def _has_room(runtime: Runtime) -> bool:
    """Whether copies of the weights take no more than `COPIES` of the device's memory, if it has one of its own."""
    if runtime.device.type != "cuda":
        return True
    with runtime.autocast():
        half = torch.is_autocast_enabled("cuda")
    size = sum(weight.numel() * (2 if half else weight.element_size()) for weight in runtime.policy.parameters())
    return bool(size <= COPIES * torch.cuda.get_device_properties(runtime.device).total_memory)


def _turn(row: Row) -> tuple[int, str]:
    """Return what rows are ordered by where the order must not depend on time: those of earlier steps first."""
    return row.request.key.step, row.request.session


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

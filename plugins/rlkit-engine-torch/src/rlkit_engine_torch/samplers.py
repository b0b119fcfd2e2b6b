"""How rows are sampled: step by step with a decoder, or through a model's own `generate`.

`select` runs on the event loop, everything else in the worker thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlkit.ops.batching import micro_batches
from rlkit_engine_torch.batch import DecodeBatch, PrefillGroup, Row, group_by_prompt
from rlkit_engine_torch.prefixes import PrefixCache
from rlkit_engine_torch.queue import RequestQueue
from rlkit_engine_torch.worker import Worker

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime
    from rlkit_engine_torch.decoder import AnyDecoder

PREFILL_TOKENS = 16384
"""Tokens of one prefill pass, padding included."""

MAX_DELAY = 32
"""Decode steps after which waiting rows join, however few they are."""

TURN_SHARE, TURN_DELAY = 1 / 2, 8
"""`refill` and `MAX_DELAY` for conversations if a decoder has no `refill`: a pass over few tokens costs a step."""

MASK_ELEMENTS = 1 << 26
"""The largest mask of a pass after prefixes: its tokens times the longest prompt."""


class Sampler(ABC):
    """Selects waiting rows, and samples those of a batch."""

    @abstractmethod
    def select(self, rows: Sequence[Row]) -> list[Row]:
        """Remove and return the waiting rows that join `rows`."""

    @abstractmethod
    def run(self, batch: DecodeBatch, joined: Sequence[Row]) -> Sequence[Row]:
        """Add rows to the batch and sample; return the rows that ended."""

    def new_batch(self, device: torch.device) -> DecodeBatch:
        """Return a batch without rows."""
        return DecodeBatch(device)

    def compact(self, batch: DecodeBatch) -> None:
        """Drop finished rows if that saves time."""

    def refresh(self) -> None:
        """Note that the weights have changed."""

    def release(self) -> None:
        """Drop all rows and release their memory."""

    @abstractmethod
    def health(self) -> dict[str, float]:
        """Return gauges."""


class DecoderSampler(Sampler):
    """Samples with a decoder: rows join between two steps.

    Args:
        decoder: Runs the model.
        queue: Holds the waiting rows.
        worker: Runs this sampler; its other calls interrupt decoding.
        max_rows: Largest number of rows in the batch.
        max_kv_tokens: Largest size of the key-value cache, as rows times the longest row.
        prefix_bytes: Largest size of the keys, values and states that are kept between turns.
    """

    def __init__(
        self,
        decoder: AnyDecoder,
        queue: RequestQueue,
        worker: Worker,
        max_rows: int,
        max_kv_tokens: int,
        *,
        prefix_bytes: int = 0,
    ) -> None:
        self.decoder = decoder
        self.prefixes = PrefixCache(prefix_bytes, decoder.recurrent)
        self._weights = 0
        """How often the weights have changed."""
        self._modules = list(decoder.model.modules())
        self._versions = versions(self._modules)
        self._prefilled = 0
        self._queue = queue
        self._worker = worker
        self._max_rows = max_rows
        self._max_kv_tokens = max_kv_tokens
        self._peak = 0
        self._steps = 0
        """Decode steps since rows were last admitted."""

    def new_batch(self, device: torch.device) -> DecodeBatch:
        return DecodeBatch(device, self.decoder.record)

    def select(self, rows: Sequence[Row]) -> list[Row]:
        joined: list[Row] = []
        waiting = self._queue.waiting
        if self._too_few(rows):
            return joined
        widest = max((len(r.request.tokens) + r.budget for r in rows), default=0)
        while waiting and len(rows) + len(joined) < self._max_rows:
            row = waiting[0]
            if row.future.done():  # cancelled, or past its deadline
                waiting.popleft()
                continue
            widest = max(widest, len(row.request.tokens) + row.budget)
            count = len(rows) + len(joined) + 1
            if count > 1 and count * widest > self._max_kv_tokens:
                break
            joined.append(waiting.popleft())
        return joined

    def run(self, batch: DecodeBatch, joined: Sequence[Row]) -> list[Row]:
        """Admit rows, then decode until a row ends, other rows can join, calls wait, or requests are interrupted."""
        queue = self._queue
        ended = self._admit(batch, joined)
        finished = sum(row.finished for row in batch.rows)
        replaced = finished and finished >= self.decoder.refill * len(batch)  # as soon as rows wait: see `compact`
        has_room = replaced or len(batch) < self._max_rows
        while batch.rows and not ended:
            self.decoder.recorded = [] if batch.records_routes else None
            logits = self.decoder.step(batch.last)
            if self.decoder.recorded:
                batch.add_routes(self.decoder.recorded[0][:, 0])
            ended = batch.sample(logits, queue.version)
            self._steps += 1
            joinable = queue.waiting and has_room and not self._too_few(batch.rows)
            if joinable or self._worker.has_calls or queue.interrupting:
                break
        self._store(batch, ended)
        self.compact(batch)
        return ended

    def compact(self, batch: DecodeBatch) -> None:
        """Drop finished rows once there are enough, or enough to replace; the last rows fill the gaps."""
        active = [i for i, row in enumerate(batch.rows) if not row.finished]
        size, total = len(active), len(batch.rows)
        share = self.decoder.refill if self._queue.waiting else self.decoder.spare
        if self.decoder.few_sizes and not self._queue.waiting:
            size = rounded_rows(size)
        if size >= total or total - size < share * total:
            return
        tail = [i for i in active if i >= size]
        remaining = [tail.pop() if tail and batch.rows[i].finished else i for i in range(size)]
        self.decoder.keep(remaining)
        batch.keep(remaining)

    def refresh(self) -> None:
        self.decoder.refresh()
        self.prefixes.clear()
        self._weights += 1
        self._modules = list(self.decoder.model.modules())
        self._versions = versions(self._modules)

    def release(self) -> None:
        self.decoder.release()

    def health(self) -> dict[str, float]:
        prefilled, self._prefilled = self._prefilled, 0
        gauges = {"rows_peak": self._peak, "slow_path": 0, "prefilled_tokens": prefilled}
        return {**{name: float(gauge) for name, gauge in gauges.items()}, **self.decoder.health()}

    def _too_few(self, rows: Sequence[Row]) -> bool:
        """Whether waiting rows wait for others, to join `rows` together."""
        share, delay = self.decoder.refill, MAX_DELAY
        if self.prefixes.bytes and not share:
            share, delay = TURN_SHARE, TURN_DELAY
        return len(self._queue.waiting) < share * len(rows) and self._steps < delay

    def _admit(self, batch: DecodeBatch, joined: Sequence[Row]) -> list[Row]:
        """Run each distinct prompt once and sample the next token of each row; return the rows that ended."""
        if joined and self._versions != versions(self._modules):  # written without a sync
            self.refresh()
        groups = group_by_prompt(joined, self.decoder.resumes, PREFILL_TOKENS, self.prefixes)
        ended: list[Row] = []
        for chunk in passes(groups):
            rows = [row for group in chunk for row in group.rows]
            for row in rows:
                row.weights = self._weights
            self.decoder.recorded = [] if any(row.request.routes_from is not None for row in rows) else None
            own = [row.request.tokens[len(group.prompt) :] for group in chunk for row in group.rows]
            logits = self.decoder.admit(
                [g.prompt for g in chunk],
                [len(g.rows) for g in chunk],
                own,
                [g.media for g in chunk],
                [g.prefix for g in chunk if g.prefix is not None],
            )
            self._prefilled += sum(group.tokens for group in chunk)
            self._take_prompt_routes(chunk)
            first = len(batch.rows)
            batch.add(rows)
            batch.cancelled |= any(row.future.done() for row in rows)  # while other prompts were run
            ended += batch.sample(logits, self._queue.version, first)
            self._store_prompts(chunk, first)
        self._peak = max(self._peak, len(batch.rows))
        self._steps = 0 if joined else self._steps
        return ended

    def _take_prompt_routes(self, groups: Sequence[PrefillGroup]) -> None:
        """Set the rows' routes of their prompts, from where they are requested, if a pass has recorded any."""
        recorded = [routes for each_pass in self.decoder.recorded or () for routes in each_pass]
        for group, routes in zip(groups, recorded, strict=False):
            for row in group.rows:
                start = row.request.routes_from
                if start is not None:
                    row.prompt_routes = routes[len(routes) - len(group.prompt) + start :].cpu()

    def _store_prompts(self, groups: Sequence[PrefillGroup], first: int) -> None:
        """Keep the keys and values of new prompts that may be continued, whose rows begin at `first`.

        States after a prompt are of no use: other rows with this prompt need the logits of its last token.
        """
        for group in () if self.decoder.recurrent else groups:
            continues = any(row.request.continues and row.failure is None for row in group.rows)
            if continues and group.prefix is None:
                self.prefixes.store(group.prompt, group.media, partial(self.decoder.keys_values, first))
            first += len(group.rows)

    def _store(self, batch: DecodeBatch, ended: Sequence[Row]) -> None:
        """Keep the keys, values and states of rows that may be continued, but for the last token, which was not run."""
        rows = set(ended)
        for index, row in enumerate(batch.rows if rows else ()):
            ready = row in rows and row.failure is None and row.weights == self._weights
            if ready and row.request.continues and row.completion is not None and not row.future.done():
                tokens = row.request.tokens + tuple(row.completion.tokens[:-1])
                keys_values, states = partial(self.decoder.keys_values, index), partial(self.decoder.states, index)
                self.prefixes.store(tokens, row.request.media, keys_values, states)


def versions(modules: Sequence[nn.Module]) -> list[int]:
    """Count how often each weight of modules was written."""
    parameters = (weight for module in modules for weight in module._parameters.values())
    return [weight._version for weight in parameters if weight is not None]


def passes(groups: Sequence[PrefillGroup]) -> Iterator[list[PrefillGroup]]:
    """Divide groups into passes over their prompts: those with a prefix apart from the others."""
    for continued in (False, True):
        alike = [group for group in groups if (group.prefix is not None) == continued]
        longest = max((len(group.prompt) for group in alike), default=1)
        limit = min(PREFILL_TOKENS, MASK_ELEMENTS // longest) if continued else PREFILL_TOKENS
        for indices in micro_batches([group.tokens for group in alike], limit):
            yield [alike[i] for i in indices]


class GenerateSampler(Sampler):
    """Samples through `generate`, prompts of one length at a time: for models without a plain cache.

    Args:
        runtime: The run, with the policy.
        queue: Holds the waiting rows.
        max_rows: Largest number of rows at once.
    """

    def __init__(self, runtime: Runtime, queue: RequestQueue, max_rows: int) -> None:
        self._runtime = runtime
        self._queue = queue
        self._max_rows = max_rows
        self._prefilled = 0

    def select(self, rows: Sequence[Row]) -> list[Row]:
        queue = self._queue
        first = queue.waiting[0].request
        kind = (len(first.tokens), bool(first.media))  # one length, all or none with pictures
        joined = [r for r in queue.waiting if (len(r.request.tokens), bool(r.request.media)) == kind][: self._max_rows]
        queue.waiting = deque(row for row in queue.waiting if row not in joined)
        return [row for row in joined if not row.future.done()]

    def run(self, batch: DecodeBatch, joined: Sequence[Row]) -> Sequence[Row]:
        """Sample rows until they end or are interrupted; the batch is empty before and after."""
        from rlkit_engine_torch.generate import generate

        if not joined:
            return joined
        batch.add(joined)

        def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
            batch.sample(logits, self._queue.version)
            finished = [row.finished or self._queue.interrupting for row in joined]
            return batch.last, torch.tensor(finished, device=logits.device)

        prompts = [row.request.tokens for row in joined]
        self._prefilled += sum(map(len, prompts))
        budget = max(row.budget for row in joined)
        try:
            pictures = [row.request.media for row in joined]
            generate(self._runtime.policy, prompts, choose, budget, self._runtime.autocast(), media=pictures)
            batch.interrupt()
        finally:
            batch.keep([])
        return joined

    def health(self) -> dict[str, float]:
        prefilled, self._prefilled = self._prefilled, 0
        return {"rows_peak": 0.0, "slow_path": 1.0, "fused": 0.0, "prefilled_tokens": float(prefilled)}


def rounded_rows(count: int) -> int:
    """Return a number of rows rounded up to one of 8 in each doubling.

    oneDNN compiles kernels of about 0.5 MB for each number of rows and each layer's shape.
    """
    step = 1 << max(count.bit_length() - 4, 0)
    return -(-count // step) * step

"""Sampling from several adapters in one batch, each row with its own."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING

import torch
from rlkit_engine_torch.decoder import Decoder
from rlkit_engine_torch.probe import why_not
from rlkit_engine_torch.sampling import Truncation, choose
from torch import Tensor

from rlkit.ops.batching import micro_batches
from rlkit.ops.random import uniform
from rlkit_tinker.bank import AdapterBank
from rlkit_tinker.routing import Pairs
from rlkit_tinker.types import RequestFailedError, SampledSequence, SamplingParams

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM, Tokenizer

PREFILL_TOKENS = 16384
"""Tokens of one pass over prompts, padding included, and of the prompts that join the batch in a step."""

MAX_KV_TOKENS = 1 << 18
"""The largest size of the cache of keys and values, as rows times the longest row."""


@dataclass(eq=False)
class SampleRow:
    """A sequence in progress.

    Args:
        prompt: Its tokens.
        pairs: The adapter; None for the base.
        params: How it is sampled.
        key: Its random numbers derive from this key and the token's position alone.
        budget: The most tokens to sample.
        tenant: Whose it is: tenants have equal shares of the batch.
    """

    prompt: tuple[int, ...]
    pairs: Pairs | None
    params: SamplingParams
    key: int
    budget: int
    tenant: str = ""
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    stopped: bool = False

    @property
    def failed(self) -> bool:
        """Whether its logits were not finite."""
        return bool(self.logps) and not isfinite(self.logps[-1])

    @property
    def finished(self) -> bool:
        """Whether no further token is sampled."""
        return self.stopped or self.failed or len(self.tokens) >= self.budget

    def sequence(self) -> SampledSequence:
        """Return the sampled sequence.

        Raises:
            RequestFailedError: Logits were not finite.
        """
        if self.failed:
            raise RequestFailedError(
                f"the logits after {len(self.tokens) - 1} tokens were not finite: the adapter's weights are too large; "
                "load an earlier state, or lower learning_rate"
            )
        return SampledSequence(self.tokens, self.logps, "stop" if self.stopped else "length")


class MixedSampler:
    """Decodes rows of several adapters together; rows of one adapter and one prompt share its keys and values.

    Rows join while others are in progress. The next to join is of the tenant that has the fewest rows in the batch, and
    one that has none need not wait for a free place, so that nobody waits for another's long samples.

    Args:
        decoder: Runs the base, whose layers call the bank.
        bank: Routes the rows.
        tokenizer: Decodes tokens, to find texts that end a row.
        end_ids: The tokens that end a turn of this model.
        max_rows: The most rows in a batch, but for the first of a tenant; further rows wait.
    """

    def __init__(
        self, decoder: Decoder, bank: AdapterBank, tokenizer: Tokenizer, end_ids: Collection[int], max_rows: int
    ) -> None:
        self._decoder = decoder
        self._bank = bank
        self._tokenizer = tokenizer
        self._end_ids = frozenset(end_ids)
        self._max_rows = max_rows
        self._waiting: dict[str, deque[SampleRow]] = {}
        self._active: list[SampleRow] = []

    def add(self, rows: Sequence[SampleRow]) -> None:
        """Add rows to those that wait."""
        for row in rows:
            self._waiting.setdefault(row.tenant, deque()).append(row)

    @torch.inference_mode()
    def advance(self, steps: int) -> None:
        """Sample up to some tokens of each row in the batch, which rows join as others finish; an error drops all."""
        try:
            for _ in range(steps):
                joined = self._joining()
                if joined:
                    self._active += self._admit(joined)
                elif self._active:
                    last = torch.tensor([row.tokens[-1] for row in self._active], device=self._decoder.device)
                    with self._bank.routed([row.pairs for row in self._active]):
                        logits = self._decoder.step(last)
                    self._choose(logits, self._active)
                self._active = self._drop_finished(self._active)
        except BaseException:
            self._waiting, self._active = {}, []
            raise
        finally:
            if not self._active:
                self._decoder.release()

    def _joining(self) -> list[SampleRow]:
        """Remove and return the waiting rows for which there is room."""
        joined: list[SampleRow] = []
        counts = Counter(row.tenant for row in self._active)
        longest = max((len(row.prompt) + row.budget for row in self._active), default=0)
        prompts: set[tuple[int, tuple[int, ...]]] = set()
        while self._waiting:
            tenant = min(self._waiting, key=lambda tenant: counts[tenant])
            row = self._waiting[tenant][0]
            longest = max(longest, len(row.prompt) + row.budget)
            count = counts.total() + 1
            if counts[tenant] and (count > self._max_rows or count * longest > MAX_KV_TOKENS):
                break
            prompts.add((id(row.pairs), row.prompt))
            if len(prompts) > 1 and sum(len(prompt) for _, prompt in prompts) > PREFILL_TOKENS:
                break
            self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            if not row.finished:  # it may have been cancelled
                joined.append(row)
                counts[tenant] += 1
        return joined

    def _admit(self, rows: Sequence[SampleRow]) -> list[SampleRow]:
        """Run each prompt once for each adapter, and sample the first token of its rows; return all in their order."""
        groups: dict[tuple[int, tuple[int, ...]], list[SampleRow]] = {}
        for row in rows:
            groups.setdefault((id(row.pairs), row.prompt), []).append(row)
        prompts = list(groups.values())
        admitted: list[SampleRow] = []
        for indices in micro_batches([len(group[0].prompt) for group in prompts], PREFILL_TOKENS):
            chunk = [prompts[i] for i in indices]
            with self._bank.routed([group[0].pairs for group in chunk]):
                logits = self._decoder.admit([group[0].prompt for group in chunk], [len(group) for group in chunk])
            chunk_rows = [row for group in chunk for row in group]
            self._choose(logits, chunk_rows)
            admitted += chunk_rows
        return admitted

    def _choose(self, logits: Tensor, rows: Sequence[SampleRow]) -> None:
        """Sample the next token of each row, and find the rows that end."""
        device = logits.device
        params = [row.params for row in rows]
        keys = torch.tensor([row.key for row in rows], device=device)
        positions = torch.tensor([len(row.prompt) + len(row.tokens) for row in rows], device=device)
        temperature = torch.tensor([float(p.temperature) for p in params], device=device)
        top_k = torch.tensor([max(p.top_k, 0) for p in params], device=device)
        top_p = torch.tensor([float(p.top_p) for p in params], device=device)
        truncation = Truncation(top_p, top_k, torch.zeros(len(rows), device=device))
        tokens, logps, _ = choose(logits, uniform(keys, positions), temperature, truncation)
        for row, token, logp in zip(rows, tokens.tolist(), logps.tolist(), strict=True):
            row.tokens.append(token)
            row.logps.append(logp)
            row.stopped = not row.failed and self._stops(row)

    def _stops(self, row: SampleRow) -> bool:
        """Whether the last token of a row ends it."""
        params = row.params
        if params.stop is None:
            return row.tokens[-1] in self._end_ids
        texts = params.stop_texts
        if not texts:
            return row.tokens[-1] in params.stop_ids
        window = 4 * max(map(len, texts)) + 8  # a character takes up to 4 tokens
        text = self._tokenizer.decode(row.tokens[-window:], skip_special_tokens=False)
        return any(stop in text for stop in texts)

    def _drop_finished(self, rows: list[SampleRow]) -> list[SampleRow]:
        """Drop finished rows from the decoder; return the others."""
        remaining = [index for index, row in enumerate(rows) if not row.finished]
        if len(remaining) == len(rows):
            return rows
        for index, row in enumerate(rows):
            if row.failed:  # a masked key still multiplies its value by 0, which stays NaN
                for layer in self._decoder.layers:
                    layer.keys[index].zero_()
                    layer.values[index].zero_()
        self._decoder.keep(remaining)
        return [rows[index] for index in remaining]


def make_decoder(model: CausalLM, autocast: Callable[[], AbstractContextManager[None]], context: int) -> Decoder:
    """Return a decoder of a model.

    Raises:
        RequestFailedError: The model has no plain cache of keys and values.
    """
    with autocast():
        problem = why_not(model)
    if problem is not None:
        raise RequestFailedError(f"{type(model).__name__} cannot be served: {problem}; choose another model")
    return Decoder(model, autocast, context)

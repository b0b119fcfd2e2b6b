"""Requests for samples: all that wait run together, whatever their adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rlkit.ops.batching import micro_batches
from rlkit_tinker.commands import APIFuture
from rlkit_tinker.passes import BasePasses, RowLogps, TokenRow
from rlkit_tinker.routing import Pairs
from rlkit_tinker.sampling import PREFILL_TOKENS, MixedSampler, SampleRow
from rlkit_tinker.types import RequestFailedError, SampleResponse

STEPS = 16
"""Tokens of each row that are sampled before other work has its turn."""


@dataclass(eq=False)
class SampleRequest:
    """A request for samples from a prompt, and for the log-probs of its tokens.

    Args:
        prompt: Its tokens.
        pairs: The adapter; None for the base.
        rows: The sequences to sample.
        prompt_logprobs: Whether the log-probs of the prompt's tokens are returned.
        top: How many of the most likely tokens are returned at each token of the prompt.
    """

    prompt: tuple[int, ...]
    pairs: Pairs | None
    rows: Sequence[SampleRow]
    prompt_logprobs: bool
    top: int
    score: RowLogps | None = None
    future: APIFuture[SampleResponse] = field(init=False)

    def __post_init__(self) -> None:
        self._unfinished = list(self.rows)

    @property
    def finished(self) -> bool:
        """Whether all sequences are."""
        while self._unfinished and self._unfinished[-1].finished:
            self._unfinished.pop()
        return not self._unfinished

    @property
    def is_scored(self) -> bool:
        """Whether a pass over the prompt is needed."""
        return (self.prompt_logprobs or self.top > 0) and len(self.prompt) > 1

    @property
    def token_row(self) -> TokenRow:
        """The prompt's tokens but for the last, with the tokens after them."""
        return TokenRow(self.prompt[:-1], torch.tensor(self.prompt[1:]), self.pairs)

    def resolve(self) -> None:
        """Resolve the future with the samples, or with the reason why one has failed."""
        logps: list[float | None] = [None]
        tops: list[list[tuple[int, float]] | None] = [None]
        if self.score is not None:
            logps += self.score.targets.tolist()
            ids, top = (x[:, : self.top].tolist() for x in (self.score.top_ids, self.score.top))
            tops += [list(zip(*pair, strict=True)) for pair in zip(ids, top, strict=True)]
        try:
            sequences = [row.sequence() for row in self.rows]
        except RequestFailedError as error:
            self.future.set_exception(error)
            return
        self.future.set_result(
            SampleResponse(sequences, logps if self.prompt_logprobs else None, tops if self.top else None)
        )


class SamplingQueue:
    """Runs requests together; each is resolved as soon as its own samples are finished.

    Args:
        sampler: Samples rows.
        passes: Computes the log-probs of prompts.
    """

    def __init__(self, sampler: MixedSampler, passes: BasePasses) -> None:
        self._sampler = sampler
        self._passes = passes
        self._running: list[SampleRequest] = []

    def submit(self, request: SampleRequest) -> APIFuture[SampleResponse]:
        """Add a request; return its result to come."""
        request.future = APIFuture(self._run_until)
        self._running.append(request)
        self._sampler.add(request.rows)
        return request.future

    def advance(self) -> None:
        """Sample some tokens of each row, and resolve the requests that are finished."""
        try:
            self._sampler.advance(STEPS)
            finished = [request for request in self._running if request.finished]
            self._score_prompts([request for request in finished if request.is_scored])
        except BaseException as error:
            requests, self._running = self._running, []
            for request in requests:
                request.future.set_exception(error)
            raise
        if finished:
            self._running = [request for request in self._running if not request.finished]
        for request in finished:
            request.resolve()

    def cancel(self, future: APIFuture[SampleResponse]) -> None:
        """End the samples of a request before their time."""
        for request in self._running:
            if request.future is future:
                for row in request.rows:
                    row.budget = 0

    def _run_until(self, future: APIFuture[SampleResponse]) -> None:
        while not future.done:
            self.advance()

    @torch.no_grad()
    def _score_prompts(self, requests: Sequence[SampleRequest]) -> None:
        for indices in micro_batches([len(request.prompt) for request in requests], PREFILL_TOKENS):
            batch = [requests[i] for i in indices]
            scores = self._passes.logps([r.token_row for r in batch], max(request.top for request in batch))
            for request, score in zip(batch, scores, strict=True):
                request.score = score

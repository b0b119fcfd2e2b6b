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
    """Runs requests.

    Args:
        sampler: Samples rows.
        passes: Computes the log-probs of prompts.
    """

    def __init__(self, sampler: MixedSampler, passes: BasePasses) -> None:
        self._sampler = sampler
        self._passes = passes
        self._waiting: list[SampleRequest] = []

    def submit(self, request: SampleRequest) -> APIFuture[SampleResponse]:
        """Add a request; return its result to come."""
        request.future = APIFuture(self._run_all)
        self._waiting.append(request)
        return request.future

    def _run_all(self, _: APIFuture[SampleResponse]) -> None:
        requests, self._waiting = self._waiting, []
        try:
            self._sampler.run([row for request in requests for row in request.rows])
            self._score_prompts([request for request in requests if request.is_scored])
        except BaseException as error:
            for request in requests:
                request.future.set_exception(error)
            raise
        for request in requests:
            request.resolve()

    @torch.no_grad()
    def _score_prompts(self, requests: Sequence[SampleRequest]) -> None:
        for indices in micro_batches([len(request.prompt) for request in requests], PREFILL_TOKENS):
            batch = [requests[i] for i in indices]
            scores = self._passes.logps([r.token_row for r in batch], max(request.top for request in batch))
            for request, score in zip(batch, scores, strict=True):
                request.score = score

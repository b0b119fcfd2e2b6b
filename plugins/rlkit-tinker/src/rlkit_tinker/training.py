"""Passes that train: requests of several tenants in micro-batches, each with its own loss and gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from rlkit.base.errors import show
from rlkit.ops.batching import micro_batches
from rlkit_tinker.bank import Adapter
from rlkit_tinker.losses import Loss, complete_config, loss_named, read_inputs
from rlkit_tinker.passes import BasePasses, TokenRow
from rlkit_tinker.types import Datum, ForwardBackwardOutput, RequestFailedError, TensorData


@dataclass(eq=False)
class PassRequest:
    """A pass over data.

    Args:
        adapter: The adapter.
        data: The data.
        loss_fn: The name of the loss.
        loss_fn_config: Its options.
        backward: Whether gradients are added to those of the adapter.
    """

    adapter: Adapter
    data: Sequence[Datum]
    loss_fn: str
    loss_fn_config: Mapping[str, float] | None
    backward: bool


@dataclass(eq=False)
class PreparedDatum:
    """A datum that was checked, and then the result of its pass."""

    request: PassRequest
    row: TokenRow
    loss: Loss
    inputs: Mapping[str, Tensor]
    config: Mapping[str, float]
    logps: Tensor | None = None
    loss_sum: float = 0.0


class Trainer:
    """Runs requests.

    Args:
        passes: Computes log-probs.
        vocabulary: The number of token ids.
        context: The most tokens of a sequence.
        max_tokens: The most tokens of a micro-batch, padding included; a longer sequence is one of its own.
    """

    def __init__(self, passes: BasePasses, vocabulary: int, context: int, max_tokens: int) -> None:
        self._passes = passes
        self._vocabulary = vocabulary
        self._context = context
        self._max_tokens = max_tokens

    def prepare(self, request: PassRequest) -> list[PreparedDatum]:
        """Check the data of a request.

        Raises:
            RequestFailedError: The loss, an option or a datum is wrong.
        """
        loss = loss_named(request.loss_fn)
        config = complete_config(request.loss_fn, request.loss_fn_config)
        if not request.data:
            raise RequestFailedError("data are empty, expected at least one datum")
        prepared = []
        for index, datum in enumerate(request.data):
            try:
                row = TokenRow(datum.model_input.tokens, self._targets(datum), request.adapter.pairs)
                prepared.append(PreparedDatum(request, row, loss.function, read_inputs(datum, loss), config))
            except RequestFailedError as error:
                raise RequestFailedError(f"datum {index}: {error}") from error
        return prepared

    def run(self, requests: Sequence[PassRequest]) -> list[ForwardBackwardOutput]:
        """Run requests, all with or all without a backward pass; no gradient changes if one fails."""
        backward = requests[0].backward
        prepared = {id(request): self.prepare(request) for request in requests}
        data = [datum for request in requests for datum in prepared[id(request)]]
        gradients: dict[Adapter, list[Tensor]] = {}
        with nullcontext() if backward else torch.no_grad():
            for indices in micro_batches([len(datum.row.tokens) for datum in data], self._max_tokens):
                self._run_micro_batch([data[i] for i in indices], gradients)
        for adapter, sums in gradients.items():
            adapter.add_gradients(sums)
        return [_output(prepared[id(request)]) for request in requests]

    def _run_micro_batch(self, data: Sequence[PreparedDatum], gradients: dict[Adapter, list[Tensor]]) -> None:
        """Compute log-probs and losses of data, and add to the gradients if there is a backward pass."""
        logps = [row.targets for row in self._passes.logps([datum.row for datum in data])]
        slopes = []  # of each loss by its log-probs
        for datum, row_logps in zip(data, logps, strict=True):
            leaf = datum.logps = row_logps.detach().requires_grad_(row_logps.requires_grad)
            loss = datum.loss(leaf, {k: x.to(leaf.device) for k, x in datum.inputs.items()}, datum.config)
            datum.loss_sum = float(loss.detach())
            slopes += torch.autograd.grad(loss, leaf) if leaf.requires_grad else ()
        if not slopes:
            return
        adapters = list(dict.fromkeys(datum.request.adapter for datum in data))
        weights = [weight for adapter in adapters for weight in adapter.parameters]
        computed = iter(torch.autograd.grad(logps, weights, slopes))
        for adapter in adapters:
            new = [next(computed) for _ in adapter.parameters]
            sums = gradients.get(adapter)
            gradients[adapter] = new if sums is None else [a + b for a, b in zip(sums, new, strict=True)]

    def _targets(self, datum: Datum) -> Tensor:
        """Return the targets [N] or [N,K] of a datum."""
        count = datum.model_input.length
        if not 1 <= count <= self._context:
            raise RequestFailedError(f"its input has {count} tokens, expected 1 to {self._context}")
        if "target_tokens" not in datum.loss_fn_inputs:
            raise RequestFailedError("loss_fn_inputs has no target_tokens; add the token after each token")
        targets = datum.loss_fn_inputs["target_tokens"]
        if targets.dtype != "int64" or len(targets.shape) not in {1, 2} or targets.shape[0] != count:
            raise RequestFailedError(f"target_tokens is {targets}, expected int64 of shape [{count}] or [{count}, K]")
        check_ids(datum.model_input.tokens, self._vocabulary)
        check_ids(targets.data, self._vocabulary)
        return targets.to_torch()


def check_ids(tokens: Sequence[int], vocabulary: int) -> None:
    """Check that token ids are in the vocabulary.

    Raises:
        RequestFailedError: One is not.
    """
    wrong = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise RequestFailedError(f"the token {show(wrong)} is not in the vocabulary, expected 0 to {vocabulary - 1}")


def _output(data: Sequence[PreparedDatum]) -> ForwardBackwardOutput:
    outputs = [{"logprobs": TensorData(datum.logps)} for datum in data if datum.logps is not None]
    metrics = {
        "loss:sum": sum(datum.loss_sum for datum in data),
        "tokens:sum": float(sum(len(datum.row.tokens) for datum in data)),
    }
    return ForwardBackwardOutput(outputs, metrics)

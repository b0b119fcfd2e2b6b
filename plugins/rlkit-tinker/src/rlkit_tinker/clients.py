"""The clients of a service: one trains an adapter, the other samples from a copy of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from rlkit.base.errors import show
from rlkit.models.source import base_name
from rlkit_tinker.bank import Adapter
from rlkit_tinker.checkpoints import export, folder_of, load_state, save_state, write_folder
from rlkit_tinker.commands import APIFuture, CommandLog
from rlkit_tinker.routing import Pairs
from rlkit_tinker.sampling import SampleRow
from rlkit_tinker.sampling_queue import SampleRequest
from rlkit_tinker.training import PassRequest, check_ids
from rlkit_tinker.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    OptimStepResponse,
    RequestFailedError,
    SampleResponse,
    SamplingParams,
    TensorData,
)

if TYPE_CHECKING:
    from rlkit_tinker.service import Service

T = TypeVar("T")

MAX_SAMPLES = 4096
"""The most samples of a request."""

CustomLoss = Callable[[Sequence[Datum], list[Tensor]], tuple[Tensor, Mapping[str, float]]]
"""A function from data and the log-probs of their targets to a loss and metrics."""


class TrainingClient:
    """Trains one adapter. Commands run in the order of the calls, when a result is asked for.

    Args:
        service: The service.
        adapter: The adapter.
        model_id: The name of the adapter in this service.
    """

    def __init__(self, service: Service, adapter: Adapter, model_id: str) -> None:
        self.model_id = model_id
        self._service = service
        self.adapter = adapter
        self._log = CommandLog()
        self._closed = False

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Compute log-probs and the loss."""
        return self._submit(PassRequest(self.adapter, list(data), loss_fn, loss_fn_config, backward=False))

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Compute log-probs and the loss, and add its gradient to that of the next step.

        Args:
            data: The data.
            loss_fn: cross_entropy, importance_sampling, ppo, cispo, dro or gspo: a sum over tokens.
            loss_fn_config: The options of the loss.
        """
        return self._submit(PassRequest(self.adapter, list(data), loss_fn, loss_fn_config, backward=True))

    def forward_backward_custom(self, data: Sequence[Datum], loss_fn: CustomLoss) -> APIFuture[ForwardBackwardOutput]:
        """Add the gradient of a loss in Python: that of cross_entropy with the weights -dC/dlogprobs.

        Args:
            data: The data, with `target_tokens`.
            loss_fn: Returns the loss C and metrics from the data and the log-probs of their targets.
        """
        targets = [{"target_tokens": datum.loss_fn_inputs.get("target_tokens", TensorData([]))} for datum in data]
        plain = [
            Datum(datum.model_input, inputs | {"weights": torch.zeros(inputs["target_tokens"].shape)})
            for datum, inputs in zip(data, targets, strict=True)
        ]
        logps = [
            output["logprobs"].to_torch().requires_grad_()
            for output in self.forward(plain, "cross_entropy").result().loss_fn_outputs
        ]
        loss, metrics = loss_fn(data, logps)
        slopes = torch.autograd.grad(loss, logps, allow_unused=True, materialize_grads=True)
        weighted = [
            Datum(datum.model_input, inputs | {"weights": -slope})
            for datum, inputs, slope in zip(data, targets, slopes, strict=True)
        ]
        future = self.forward_backward(weighted, "cross_entropy")
        return future.then(lambda output: _with_metrics(output, {**metrics, "loss:sum": float(loss)}))

    def optim_step(self, adam_params: AdamParams) -> APIFuture[OptimStepResponse]:
        """Make a step of AdamW with the gradient since the last step; without one, nothing changes."""
        if not isinstance(adam_params, AdamParams):
            raise RequestFailedError(f"adam_params is {show(adam_params)}, expected AdamParams")
        return self._submit(lambda: self.adapter.optim_step(adam_params))

    def save_weights_and_get_sampling_client(self) -> SamplingClient:
        """Return a client that samples from the weights after the commands before; later steps do not change them."""
        return SamplingClient(self._service, self._submit(self.adapter.frozen_pairs).result())

    def save_state(self, name: str, overwrite: bool = False) -> APIFuture[str]:
        """Save weights, moments and retained gradients; the result is the path `tinker://MODEL/weights/NAME`.

        Args:
            name: The name of the state.
            overwrite: Whether a state of this name is replaced.
        """
        path = f"tinker://{self.model_id}/weights/{name}"
        folder, base = folder_of(self._service.folder, path), base_name(self._service.model.path)

        def save() -> str:
            write_folder(folder, lambda part: save_state(self.adapter, self._service.bank, base, part), overwrite)
            return path

        return self._submit(save)

    def load_state(self, path: str, optimizer: bool = False) -> APIFuture[None]:
        """Load a state that any client of these layers and this rank has saved.

        Args:
            path: Its path, from `save_state`.
            optimizer: Whether its moments and retained gradients are loaded too; without, the client has none.
        """
        folder = folder_of(self._service.folder, path)
        return self._submit(lambda: load_state(self.adapter, self._service.bank, folder, optimizer))

    def export(self, folder: Path | str, merged: bool = False) -> APIFuture[None]:
        """Write the adapter as peft loads it, with the tokenizer.

        Args:
            folder: The folder to write.
            merged: Whether the base with the adapter merged is written instead, as a model of transformers.
        """
        return self._submit(lambda: export(self._service, self.adapter.frozen_pairs(), Path(folder), merged))

    def close(self) -> None:
        """Free the adapter's slot, after the commands before."""
        if not self._closed:
            self._submit(lambda: self._service.bank.free(self.adapter)).result()
            self._closed = True

    def __enter__(self) -> TrainingClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, work: PassRequest | Callable[[], T]) -> APIFuture[T]:
        if self._closed:
            raise RequestFailedError(f"{self.model_id} is closed; create another training client")
        return self._service.scheduler.submit(self._log, work)


class SamplingClient:
    """Samples from an adapter as it was when this client was created, or from the base.

    Args:
        service: The service.
        pairs: The matrices of the adapter; None for the base.
        tenant: Whose it is: the samples of several tenants have equal shares of a batch.
    """

    def __init__(self, service: Service, pairs: Pairs | None, tenant: str = "") -> None:
        self._service = service
        self._pairs = pairs
        self._tenant = tenant

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> APIFuture[SampleResponse]:
        """Sample from a prompt; requests whose results nobody has asked for run together.

        Args:
            prompt: The prompt.
            num_samples: The number of samples.
            sampling_params: How they are sampled.
            include_prompt_logprobs: Whether the log-probs of the prompt's tokens are returned.
            topk_prompt_logprobs: How many of the most likely tokens are returned at each token of the prompt.

        Raises:
            RequestFailedError: A number is out of range, or the prompt fills the model's context.
        """
        context = self._service.context
        check_ids(prompt.tokens, self._service.vocabulary)
        if not 1 <= prompt.length < context:
            raise RequestFailedError(f"the prompt has {prompt.length} tokens, expected 1 to {context - 1}")
        for name, number, low in (("num_samples", num_samples, 1), ("topk_prompt_logprobs", topk_prompt_logprobs, 0)):
            if type(number) is not int or not low <= number <= MAX_SAMPLES:
                raise RequestFailedError(f"{name} is {show(number)}, expected an integer from {low} to {MAX_SAMPLES}")
        budget = min(sampling_params.max_tokens or context, context - prompt.length)
        keys = self._service.sample_keys(sampling_params.seed, num_samples)
        rows = [SampleRow(prompt.tokens, self._pairs, sampling_params, key, budget, self._tenant) for key in keys]
        return self._service.samples.submit(
            SampleRequest(prompt.tokens, self._pairs, rows, include_prompt_logprobs, topk_prompt_logprobs)
        )

    def compute_logprobs(self, prompt: ModelInput) -> APIFuture[list[float | None]]:
        """Compute the log-probs of a prompt's tokens, None for the first."""
        future = self.sample(prompt, 1, SamplingParams(max_tokens=1, seed=0), include_prompt_logprobs=True)
        return future.then(lambda response: response.prompt_logprobs or [])


def _with_metrics(output: ForwardBackwardOutput, metrics: Mapping[str, float]) -> ForwardBackwardOutput:
    return ForwardBackwardOutput(output.loss_fn_outputs, {**output.metrics, **metrics})

"""Runs requests on a service, in the thread that the service belongs to."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rlkit.base.errors import explain
from rlkit_tinker.checkpoints import load_state, read_pairs, save_adapter, save_state, write_folder
from rlkit_tinker.clients import SamplingClient, TrainingClient
from rlkit_tinker.server import bodies
from rlkit_tinker.server.codec import config_of, data_of, encode_pass, encode_samples
from rlkit_tinker.server.folders import ModelFolders, version_of
from rlkit_tinker.server.requests import (
    CREATE,
    LOAD,
    PASS,
    SAVE,
    SAVE_SAMPLER,
    STEP,
    WireRequest,
    WireResult,
    read_body,
)
from rlkit_tinker.server.state import SamplerSource, session_of
from rlkit_tinker.types import ForwardBackwardOutput, RequestFailedError, SampleResponse

if TYPE_CHECKING:
    from rlkit_tinker.commands import APIFuture
    from rlkit_tinker.routing import Pairs
    from rlkit_tinker.service import Service

T = TypeVar("T")

MAX_SAMPLERS_LOADED = 16
"""The most adapters for sampling in memory, besides those that a batch needs."""


@dataclass(frozen=True)
class RunningSamples:
    """A request for samples that runs.

    Args:
        future: Its samples to come.
        first: The number of the prompt's first tokens whose log-probs are left out.
        top: How many of the most likely tokens are returned at each of the others.
    """

    future: APIFuture[SampleResponse]
    first: int
    top: int

    def result(self) -> WireResult:
        """Return the message of the samples.

        Raises:
            RequestFailedError: They have failed.
        """
        response = self.future.result()
        tokens = sum(len(sequence.tokens) for sequence in response.sequences)
        return WireResult(encode_samples(_without_first(response, self.first), self.top), is_json=False, tokens=tokens)


class ServiceExecutor:
    """Runs requests on a service; used from one thread.

    Args:
        service: The service.
        folders: The folders of models.
    """

    def __init__(self, service: Service, folders: ModelFolders) -> None:
        self._service = service
        self._folders = folders
        self._clients: dict[str, TrainingClient] = {}
        self._failures: dict[str, str] = {}
        """Why a model cannot be used, by its id."""
        self._unrestored: dict[str, Path] = {}
        """The states of models that cannot be restored, which stay for a server that can."""
        self._pairs: OrderedDict[SamplerSource, Pairs] = OrderedDict()
        self._sampling: dict[str, RunningSamples] = {}
        """The requests for samples that run, by their ids."""
        self._commands: dict[str, Callable[[WireRequest, str], WireResult]] = {
            CREATE: self._create,
            LOAD: self._load,
            STEP: self._step,
            SAVE: self._save,
            SAVE_SAMPLER: self._save_for_sampler,
        }

    def run_round(self, requests: Sequence[WireRequest], tenants: Sequence[str]) -> list[WireResult]:
        """Run commands in their order, and then passes together; return their results."""
        results: list[WireResult | Callable[[], WireResult]] = []
        for request, tenant in zip(requests, tenants, strict=True):
            if request.route == PASS:
                results.append(self._submit_pass(request))
            else:
                results.append(_attempt(partial(self._commands[request.route], request, tenant)))
        return [result if isinstance(result, WireResult) else _attempt(result) for result in results]

    def advance_samples(
        self, requests: Sequence[WireRequest], tenants: Sequence[str], sources: Sequence[SamplerSource | None]
    ) -> dict[str, WireResult]:
        """Start requests for samples, and sample some tokens of all that run; return the results of those that end."""
        results: dict[str, WireResult] = {}
        for request, tenant, source in zip(requests, tenants, sources, strict=True):
            started = _attempt(partial(self._start_samples, request, tenant, source))
            if isinstance(started, WireResult):
                results[request.id] = started
            else:
                self._sampling[request.id] = started
        with suppress(Exception):  # which the futures raise
            self._service.samples.advance()
        for request_id, sampling in list(self._sampling.items()):
            if sampling.future.done:
                results[request_id] = _attempt(sampling.result)
                del self._sampling[request_id]
        return results

    def cancel_samples(self, session: str) -> None:
        """End the samples of a session before their time."""
        for request_id, sampling in self._sampling.items():
            if session_of(request_id) == session:
                self._service.samples.cancel(sampling.future)

    def free(self, model: str) -> None:
        """Free the slot of a model, and remove what only its session could use."""
        self._failures.pop(model, None)
        self._unrestored.pop(model, None)
        client = self._clients.pop(model, None)
        if client is not None:
            client.close()
        self._folders.end(model)

    def forget(self, source: SamplerSource) -> None:
        """Remove the weights of a sampling session without a name."""
        if source.folder is not None and source.model_path is None:
            self._pairs.pop(source, None)
            shutil.rmtree(self._service.folder / source.folder, ignore_errors=True)

    def save_models(self, folder: Path) -> dict[str, str]:
        """Save the states of all models into a folder; return their folders by the ids of the models."""
        bank, folders = self._service.bank, {}
        for number, (model, client) in enumerate(self._clients.items()):
            write_folder(folder / str(number), partial(save_state, client.adapter, bank, ""), overwrite=True)
            folders[model] = f"{folder.name}/{number}"
        for number, (model, state) in enumerate(self._unrestored.items(), len(folders)):
            folders[model] = f"{folder.name}/{number}"
            self._unrestored[model] = shutil.copytree(state, folder / str(number))
        return folders

    def restore(self, model: str, folder: Path | None) -> None:
        """Restore a model from its state; without one its creation has failed."""
        try:
            if folder is None:
                raise RequestFailedError("its creation has failed")
            self._clients[model] = self._client_of(model, folder, optimizer=True)
        except RequestFailedError as error:
            self._failures[model] = str(error)
            if folder is not None:
                self._unrestored[model] = folder

    def check_source(self, source: SamplerSource) -> None:
        """Load the weights of a new sampling session.

        Raises:
            RequestFailedError: They cannot be loaded.
        """
        self._pairs_of(source)

    def _create(self, request: WireRequest, tenant: str) -> WireResult:
        body = read_body(bodies.CreateModelBody, request.body)
        self._folders.check_base(body.base_model)
        lora = body.lora_config
        adapter = self._service.bank.create(
            lora.rank,
            _seed_of(request.owner) if lora.seed is None else lora.seed,
            attn=lora.train_attn,
            mlp=lora.train_mlp,
            unembed=lora.train_unembed,
        )
        self._clients[request.owner] = TrainingClient(self._service, adapter, request.owner)
        self._folders.add(request.owner, tenant, body.base_model, lora.model_dump(), body.user_metadata)
        return WireResult.of({"type": CREATE, "model_id": request.owner})

    def _load(self, request: WireRequest, tenant: str) -> WireResult:
        body = read_body(bodies.LoadBody, request.body)
        folder = self._folders.folder_of(body.path, tenant)
        source = self._folders.read(folder.parent.parent.name)
        if request.seq:
            load_state(self._client(request).adapter, self._service.bank, folder, body.optimizer)
        else:
            base = source["base_model"] if body.base_model is None else body.base_model
            self._folders.check_base(base)
            self._clients[request.owner] = self._client_of(request.owner, folder, body.optimizer)
            metadata = source["user_metadata"] if body.user_metadata is None else body.user_metadata
            self._folders.add(request.owner, tenant, base, source["lora_config"], metadata)
        return WireResult.of({"type": LOAD, "path": body.path, "model_id": request.owner})

    def _client_of(self, model: str, folder: Path, optimizer: bool) -> TrainingClient:
        """Return the client of a new model with a saved state."""
        bank = self._service.bank
        adapter = bank.add(read_pairs(folder, bank))
        try:
            load_state(adapter, bank, folder, optimizer)
        except RequestFailedError:
            bank.free(adapter)
            raise
        return TrainingClient(self._service, adapter, model)

    def _step(self, request: WireRequest, tenant: str) -> WireResult:
        client = self._client(request)
        params = read_body(bodies.StepBody, request.body).params
        return WireResult.of({"metrics": client.optim_step(params).result().metrics})

    def _save(self, request: WireRequest, tenant: str) -> WireResult:
        body = read_body(bodies.SaveBody, request.body)
        adapter, bank = self._client(request).adapter, self._service.bank
        path = f"tinker://{request.owner}/weights/{body.path}"
        write = partial(save_state, adapter, bank, self._folders.base)
        self._folders.write(request, path, body.ttl_seconds, write, body.overwrite)
        return WireResult.of({"type": SAVE, "path": path})

    def _save_for_sampler(self, request: WireRequest, tenant: str) -> WireResult:
        body = read_body(bodies.SaveSamplerBody, request.body)
        adapter, bank = self._client(request).adapter, self._service.bank
        write = partial(save_adapter, adapter.pairs, bank, self._folders.base)
        if body.path is not None:
            path = f"tinker://{request.owner}/sampler_weights/{body.path}"
            self._folders.write(request, path, body.ttl_seconds, write)
            return WireResult.of({"type": SAVE_SAMPLER, "path": path})
        if body.sampling_session_seq_id is None:
            raise RequestFailedError("path and sampling_session_seq_id are missing; give one of them")
        write_folder(self._service.folder / snapshot_folder(request), write, overwrite=True)
        name = f"{request.session}:sample:{body.sampling_session_seq_id}"
        return WireResult.of({"type": SAVE_SAMPLER, "sampling_session_id": name})

    def _submit_pass(self, request: WireRequest) -> WireResult | Callable[[], WireResult]:
        backward = not request.body.forward_only

        def submit() -> Callable[[], WireResult]:
            client = self._client(request)
            try:
                data, config = data_of(request.body), config_of(request.body)
            except RequestFailedError as error:
                if backward:
                    client.adapter.failure = f"a forward_backward before it failed: {error}"
                raise
            run = client.forward_backward if backward else client.forward
            future: APIFuture[ForwardBackwardOutput] = run(data, request.body.loss_fn, config)

            def result() -> WireResult:
                output = future.result()
                return WireResult(encode_pass(output), is_json=False, tokens=int(output.metrics["tokens:sum"]))

            return result

        return _attempt(submit)

    def _start_samples(self, request: WireRequest, tenant: str, source: SamplerSource | None) -> RunningSamples:
        if source is None:
            raise RequestFailedError(f"the sampling session {request.owner} was closed for newer ones; create another")
        body = read_body(bodies.SampleBody, request.body)
        client = SamplingClient(self._service, self._pairs_of(source), tenant)
        include, top, last = bool(body.prompt_logprobs), body.topk_prompt_logprobs, body.prompt_logprobs_last_n
        prompt = body.model_input
        if last is not None and not (include and last < prompt.length):
            raise RequestFailedError(
                f"prompt_logprobs_last_n is {last}, expected prompt_logprobs, and at most {prompt.length - 1}"
            )
        future = client.sample(prompt, body.num_samples, body.params(_seed_of(request.id)), include, top)
        first = 0 if last is None else prompt.length - last
        return RunningSamples(future, first, top)

    def _client(self, request: WireRequest) -> TrainingClient:
        if request.owner not in self._clients:
            reason = self._failures.get(request.owner, "its creation has failed")
            raise RequestFailedError(f"the model {request.owner} cannot be used: {reason}; create another")
        return self._clients[request.owner]

    def _pairs_of(self, source: SamplerSource) -> Pairs | None:
        """Return the matrices of a source, which stay loaded while they are used."""
        if source.folder is None:
            return None
        if source not in self._pairs:
            folder = self._service.folder / source.folder
            if source.version != version_of(folder):
                raise RequestFailedError(
                    f"{source.model_path} was overwritten or removed; create another sampling client"
                )
            self._pairs[source] = read_pairs(folder, self._service.bank)
        self._pairs.move_to_end(source)
        while len(self._pairs) > MAX_SAMPLERS_LOADED:
            self._pairs.popitem(last=False)
        return self._pairs[source]


def snapshot_folder(request: WireRequest) -> str:
    """Return the folder, within that of the server, of weights that a request saves without a name."""
    return f"{request.owner}/snapshots/{request.seq}"


def _seed_of(name: str) -> int:
    """Return the seed of what has none of its own: the same after a restart."""
    return int.from_bytes(blake2b(name.encode(), digest_size=7).digest())


def _without_first(response: SampleResponse, count: int) -> SampleResponse:
    """Return a response without the log-probs of the first tokens of the prompt."""
    if not count:
        return response
    logps, tops = response.prompt_logprobs, response.topk_prompt_logprobs
    return SampleResponse(
        response.sequences,
        None if logps is None else [*[None] * count, *logps[count:]],
        None if tops is None else [*[None] * count, *tops[count:]],
    )


def _attempt(work: Callable[[], T]) -> T | WireResult:
    """Return the result of a function, or the failure of its request."""
    try:
        return work()
    except RequestFailedError as error:
        return WireResult.failed(str(error))
    except Exception as error:
        return WireResult.failed(f"the server failed: {explain(error)}", "server")

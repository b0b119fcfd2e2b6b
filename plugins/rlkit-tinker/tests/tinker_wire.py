"""A client of the wire in few lines: bodies of requests as the SDK sends them, without the SDK."""

from __future__ import annotations

import json
from asyncio import CancelledError, create_task
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web
from rlkit_tinker import Datum, Service
from rlkit_tinker.server.app import TinkerApp
from rlkit_tinker.server.coordinator import Coordinator
from rlkit_tinker.server.executor import ServiceExecutor
from rlkit_tinker.server.folders import ModelFolders
from rlkit_tinker.server.journal import Journal
from rlkit_tinker.server.messages import CLASSES
from rlkit_tinker.server.requests import read_request
from rlkit_tinker.server.routes import Routes

BASE = "Qwen/Qwen3-8B"
"""The name under which tests ask for the tiny base."""


def pass_body(model: str, seq: int, data: Sequence[Datum], loss: str = "cross_entropy", **options: Any) -> bytes:
    """Return the message of a pass."""
    message = CLASSES["ForwardBackwardRequest"](model_id=model, seq_id=seq, loss_fn=loss, **options)
    for datum in data:
        row = message.data.add()
        row.model_input.add().encoded_text.tokens = np.array(datum.model_input.to_ints(), "<i4").tobytes()
        for name, array in datum.loss_fn_inputs.items():
            row.loss_fn_inputs[name].dense = array.to_numpy().tobytes()
            row.loss_fn_inputs[name].dtype = 1 if array.dtype == "float32" else 2
            row.loss_fn_inputs[name].shape.extend(array.shape)
    return message.SerializeToString()


def json_body(**fields: Any) -> bytes:
    """Return a JSON object."""
    return json.dumps(fields).encode()


def create_body(session: str, number: int = 0, **options: Any) -> bytes:
    """Return the request for a model of rank 4 with seed 1."""
    lora = {"rank": 4, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True, **options}
    return json_body(session_id=session, model_seq_id=number, base_model=BASE, lora_config=lora, type="create_model")


def sample_body(sampler: str, seq: int, **options: Any) -> bytes:
    """Return a request for samples of 4 tokens."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7, 8]}]}
    params = {"max_tokens": 4, "temperature": 1.0, "top_k": -1, "top_p": 1.0, **options.pop("sampling_params", {})}
    fields = {"num_samples": 2, "prompt": prompt, "sampling_params": params, "type": "sample", **options}
    return json_body(sampling_session_id=sampler, seq_id=seq, **fields)


def coordinator_of(service: Service, folder: Path) -> Coordinator:
    """Return a coordinator over the states in a folder, as a server that starts."""
    service.folder = folder
    coordinator = Coordinator(Journal(folder), ServiceExecutor(service, folders_of(folder)), folder)
    coordinator.recover()
    return coordinator


def folders_of(folder: Path) -> ModelFolders:
    """Return the files of models in a folder."""
    return ModelFolders(folder, "tiny", [BASE, "tiny"])


@asynccontextmanager
async def running(coordinator: Coordinator) -> AsyncIterator[Coordinator]:
    """Run what is accepted; at the end forget all models, as a process that ends does."""
    task = create_task(coordinator.run())
    try:
        yield coordinator
    finally:
        task.cancel()
        with suppress(CancelledError):
            await task
        await coordinator.close()
        for model in list(coordinator._executor._clients):
            coordinator._executor._clients.pop(model).close()


async def ask(coordinator: Coordinator, route: str, raw: bytes, tenant: str = "alice") -> bytes:
    """Send a request, and return what its future answers."""
    request = read_request(route, raw)
    await coordinator.submit(request, tenant)
    result = await coordinator.retrieve(request.id, coordinator.session(request.owner, tenant), 60)
    assert result is not None
    return result.content


class Wire:
    """Sends requests to an address.

    Args:
        http: The connections.
        url: The address.
        routes: What answers there.
        key: The key of the tenant.
    """

    def __init__(self, http: aiohttp.ClientSession, url: str, routes: Routes, key: str = "tml-alice") -> None:
        self.routes = routes
        self._http = http
        self._url = url
        self._key = key

    def of(self, key: str) -> Wire:
        """Return a client with another key."""
        return Wire(self._http, self._url, self.routes, key)

    async def send(self, path: str, raw: bytes = b"{}", method: str = "POST") -> tuple[int, bytes]:
        """Send a request; return the status and the content."""
        headers = {"X-API-Key": self._key}
        async with self._http.request(method, f"{self._url}/api/v1/{path}", data=raw, headers=headers) as response:
            return response.status, await response.read()

    async def json(self, path: str, raw: bytes = b"{}", method: str = "POST") -> Any:
        """Send a request that succeeds; return the JSON in its answer."""
        status, content = await self.send(path, raw, method)
        assert status == 200, content
        return json.loads(content)

    async def result(self, request_id: str) -> bytes:
        """Return what a future answers."""
        status, content = 408, b""
        while status == 408:
            status, content = await self.send("retrieve_future", json_body(request_id=request_id))
        assert status == 200, content
        return content

    async def call(self, route: str, raw: bytes) -> Any:
        """Send a request that has a future; return the JSON that it answers, or its message."""
        content = await self.result((await self.json(route, raw))["request_id"])
        return json.loads(content) if content.startswith(b"{") else content

    async def session(self) -> str:
        """Return a new session."""
        return str((await self.json("create_session", json_body(tags=[], sdk_version="0.38")))["session_id"])

    async def model(self, **options: Any) -> str:
        """Return a new model in a session of its own."""
        return str((await self.call("create_model", create_body(await self.session(), **options)))["model_id"])


@asynccontextmanager
async def served(service: Service, folder: Path, keys: Sequence[str] = ()) -> AsyncIterator[Wire]:
    """Serve a folder on a free port; yield a client."""
    coordinator = coordinator_of(service, folder)
    routes = Routes(coordinator, coordinator._executor._folders, service.context, "tokenizer", 300.0)
    app = TinkerApp(routes, frozenset(keys))
    runner = web.AppRunner(app.build(), shutdown_timeout=0.1)
    await runner.setup()
    listener = await app.listen(runner, "127.0.0.1", 0)
    async with running(coordinator), aiohttp.ClientSession() as http:
        yield Wire(http, f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", routes)
        listener.close()
        await runner.cleanup()

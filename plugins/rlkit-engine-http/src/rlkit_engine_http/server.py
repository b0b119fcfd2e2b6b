"""The server's side: TorchEngine behind HTTP; weights arrive while it is paused."""

from __future__ import annotations

import asyncio
import hmac
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from rlkit_engine_torch.engine import TorchEngine
from rlkit_servers.api import ServerOutput
from rlkit_servers.changes import WeightReceiver
from rlkit_servers.http import UNREADABLE
from safetensors import SafetensorError, safe_open

from rlkit.base.errors import EngineError, RolloutError
from rlkit.models.weights import as_saved, saved_buffers
from rlkit.rollout.gate import Gate
from rlkit.types import Request, SampleKey, Sampling, StopReason, Structure

LARGEST_BODY = 64 * 1024 * 1024

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class ServerRuntime:
    """The part of a `Runtime` that TorchEngine reads."""

    policy: Any
    context: int
    device: torch.device
    folder: Path | None = None
    """The folder with the tokenizer, which structures need."""
    stop_ids: frozenset[int] = frozenset()
    """Empty: each request names its own."""
    tensor_parallel: int = 1

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder)

    def unsharded(self) -> AbstractContextManager[None]:
        return nullcontext()

    def autocast(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass
class SamplingServer:
    """Samples unless it is paused; it starts paused, without weights.

    Args:
        engine: The engine that samples.
        policy: The engine's model, into which weights are copied.
    """

    engine: TorchEngine
    policy: Any
    _labels: list[str] = field(default_factory=lambda: [""])
    """The label of each version of the engine's weights."""
    _gate: Gate = field(default_factory=Gate)

    def __post_init__(self) -> None:
        self._receiver = WeightReceiver(saved_views(self.policy))
        self.device = next(self.policy.parameters()).device

    @property
    def label(self) -> str:
        """The label of the current weights."""
        return self._labels[-1]

    async def generate(self, request: Request) -> ServerOutput:
        """Continue a request's tokens; after a pause in the middle, the new weights continue them."""
        completion = await self._gate.ask(request, self.engine.generate)
        labels = [self._labels[version] for version in completion.versions]
        stopped = completion.stop is StopReason.STOP
        candidates: list[Sequence[int]] = [list(ids) for ids in completion.candidates]
        return ServerOutput(completion.tokens, completion.logps, labels, stopped, candidates=candidates)

    async def probe(self, row: list[int], count: int) -> ServerOutput:
        """Return a row's tokens after the first, and then `count` greedy ones, with their log-probs."""
        greedy = Sampling(max_tokens=count, temperature=0.0)
        sampled = await self.generate(Request(tuple(row), greedy, SampleKey(0, 0, "probe", 0), "probe"))
        logps = await asyncio.to_thread(self._score, row)
        return ServerOutput([*row[1:], *sampled.tokens], [*logps, *sampled.logps])

    @torch.inference_mode()
    def _score(self, row: list[int]) -> list[float]:
        tokens = torch.tensor([row], device=self.device)
        logps_TV = torch.log_softmax(self.policy(input_ids=tokens, use_cache=False).logits[0, :-1].float(), -1)
        logps: list[float] = logps_TV.gather(-1, tokens[0, 1:, None]).squeeze(-1).tolist()
        return logps

    async def pause(self) -> None:
        """Interrupt sampling; return once no request is sampled."""
        self._gate.close()
        self.engine.interrupt()
        await self._gate.quiet()
        self._receiver.begin()

    def resume(self, label: str) -> None:
        """Resume sampling from weights with this label.

        Raises:
            RefusedWeights: Not all changes to these weights have come.
        """
        self._receiver.finish(label)
        self._labels.append(label)
        self.engine.version = len(self._labels) - 1
        self._gate.open()

    def load(self, file: str) -> None:
        """Copy weights, or apply changes, from a safetensors file.

        Raises:
            ValueError: Sampling is not paused, a tensor does not fit the model, or changes are of other weights.
            SafetensorError: The file is not a safetensors file.
        """
        if self._gate.is_open:
            raise ValueError("weights arrived while the server samples; pause it first")
        with safe_open(file, framework="pt") as tensors:
            self._receiver.load({name: tensors.get_tensor(name) for name in tensors.keys()}, tensors.metadata() or {})  # noqa: SIM118 (no mapping)


def application(server: SamplingServer, secret: str) -> web.Application:
    """Return the endpoints: JSON in and out, for callers that send the secret."""

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not hmac.compare_digest(request.headers.get("Authorization", "").encode(), f"Bearer {secret}".encode()):
            return web.json_response({"error": "the secret is missing or wrong"}, status=403)
        try:
            return await handler(request)
        except (*UNREADABLE, OSError, SafetensorError, EngineError, RolloutError) as error:
            return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=400)

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"label": server.label})

    async def generate(request: web.Request) -> web.Response:
        return web.json_response(asdict(await server.generate(read_request(await request.json()))))

    async def probe(request: web.Request) -> web.Response:
        body = await request.json()
        rows = [list(map(int, row)) for row in body["rows"]]
        answers = await asyncio.gather(*(server.probe(row, int(body["count"])) for row in rows))
        return web.json_response([asdict(answer) for answer in answers])

    async def pause(_: web.Request) -> web.Response:
        await server.pause()
        return web.json_response({})

    async def weights(request: web.Request) -> web.Response:
        if request.content_type == "application/json":
            await asyncio.to_thread(server.load, str((await request.json())["file"]))
            return web.json_response({})
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:  # the trainer is on another machine
            async for chunk in request.content.iter_chunked(1 << 20):
                file.write(chunk)
            file.flush()
            await asyncio.to_thread(server.load, file.name)
        return web.json_response({})

    async def resume(request: web.Request) -> web.Response:
        server.resume(str((await request.json())["label"]))
        return web.json_response({})

    app = web.Application(middlewares=[guarded], client_max_size=LARGEST_BODY)
    app.router.add_get("/health", health)
    for path, handler in (
        ("/generate", generate), ("/probe", probe), ("/pause", pause), ("/weights", weights), ("/continue", resume),
    ):  # fmt: skip
        app.router.add_post(path, handler)
    return app


def saved_views(policy: Any) -> dict[str, torch.Tensor]:
    """Return a model's weights as saved models have them, each as a view: experts one by one."""
    views: dict[str, torch.Tensor] = {}
    for name, tensor in (*policy.named_parameters(), *saved_buffers(policy).items()):
        weight = tensor.detach()
        if weight.dim() != 3:
            views |= as_saved(policy, name, weight)
            continue
        rows = weight.view(-1, weight.shape[-1])
        numbers = torch.arange(len(rows)).view(*weight.shape[:2], 1)
        for saved_name, saved in as_saved(policy, name, numbers).items():
            start, shape = int(saved.min()), (*saved.shape[:-1], weight.shape[-1])
            views[saved_name] = rows[start : start + saved.numel()].view(shape)
    return views


def read_request(body: Any) -> Request:
    """Return the request in a call's body; raises one of `UNREADABLE` if it has none."""
    seed, step, prompt, sample, attempt = body["key"]
    sampling = Sampling(
        temperature=float(body["temperature"]),
        top_p=float(body["top_p"]),
        top_k=int(body["top_k"]),
        min_p=float(body["min_p"]),
        max_tokens=int(body["max_tokens"]),
        stop_ids=tuple(map(int, body["stop_ids"])),
        structure=body["structure"] and Structure(**body["structure"]),
    )
    key = SampleKey(int(seed), int(step), str(prompt), int(sample), int(attempt))
    if sampling.max_tokens < 1 or not body["tokens"]:
        raise ValueError(f"max_tokens is {sampling.max_tokens} after {len(body['tokens'])} tokens, expected 1 or more")
    return Request(tuple(map(int, body["tokens"])), sampling, key, session="", continues=bool(body["continues"]))

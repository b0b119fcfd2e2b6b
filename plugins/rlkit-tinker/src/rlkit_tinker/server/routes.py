"""The routes of the Tinker API, each a function from a tenant's body to an answer."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING
from uuid import uuid4

from aiohttp import web

from rlkit.base.errors import show
from rlkit.types import JsonObject
from rlkit_tinker.server import bodies
from rlkit_tinker.server.app import MAX_PENDING_BYTES, Answer
from rlkit_tinker.server.coordinator import Coordinator, RefusedError
from rlkit_tinker.server.folders import ModelFolders, version_of
from rlkit_tinker.server.requests import (
    CREATE,
    LOAD,
    PASS,
    SAMPLE,
    SAVE,
    SAVE_SAMPLER,
    STEP,
    read_body,
    read_json,
    read_request,
)
from rlkit_tinker.server.state import SamplerSource

if TYPE_CHECKING:
    from rlkit_tinker.server.state import ClientSession

POLL_SECONDS = 25.0
"""How long a poll is held; the SDK waits 45 s."""
SWEEP_SECONDS = 5.0
"""Between two looks for sessions that are silent."""
MAX_SESSIONS = 1024
"""The most sessions of a tenant."""
CLIENT_CONFIG = {"proto_compress_fwdbwd": False, "parallel_fwdbwd_chunks": True, "sample_max_concurrent_requests": 2000}
"""The flags of clients; all others stay as the SDK has them."""


class Routes:
    """Answers requests.

    Args:
        coordinator: Runs requests that have futures.
        folders: The folders of models.
        context: The most tokens of a sequence.
        tokenizer: The name or the folder of the base's tokenizer.
        silence: The seconds after which a session without a heartbeat ends.
    """

    def __init__(
        self, coordinator: Coordinator, folders: ModelFolders, context: int, tokenizer: str, silence: float
    ) -> None:
        self._coordinator = coordinator
        self._folders = folders
        self._context = context
        self._tokenizer = tokenizer
        self._silence = silence
        self._seen: dict[str, float] = {}
        """The time of the last request of each session, on the loop's clock."""

    def table(self) -> dict[tuple[str, str], Answer]:
        """Return the answers by methods and paths."""
        posts = {
            "client/config": _constant(CLIENT_CONFIG),
            "client/dynamic_config": _constant({}),
            "telemetry": _constant({"status": "accepted"}),
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_sampling_session": self._create_sampler,
            "get_info": self._get_info,
            "weights_info": self._weights_info,
            "retrieve_future": self._retrieve,
            "sessions/{id}/finish": self._finish,
            **{route: partial(self._submit, route) for route in (CREATE, LOAD, PASS, STEP, SAVE, SAVE_SAMPLER, SAMPLE)},
        }
        gets = {
            "usage": self._usage,
            "healthz": _constant({"status": "ok"}),
            "get_server_capabilities": self._capabilities,
            "samplers/{id}": self._get_sampler,
            "training_runs/{id}": self._training_run,
            "training_runs/{id}/checkpoints": self._checkpoints,
        }
        deletes = {"training_runs/{id}/checkpoints/{kind}/{name}": self._delete_checkpoint}
        methods = {"POST": posts, "GET": gets, "DELETE": deletes}
        return {(method, path): answer for method, table in methods.items() for path, answer in table.items()}

    async def sweep(self) -> None:
        """End silent sessions, remove states whose time is over, and write what tenants have used; for ever."""
        while True:
            await self.end_silent_sessions(asyncio.get_running_loop().time())
            async with self._coordinator.round:
                await asyncio.to_thread(self._folders.remove_expired)
            usage = self._coordinator.usage.all(self._coordinator.state.sessions)
            await asyncio.to_thread(self._folders.write_usage, usage)
            await asyncio.sleep(SWEEP_SECONDS)

    async def end_silent_sessions(self, now: float) -> None:
        """End the sessions that have been silent too long at a time of the loop's clock."""
        sessions = self._coordinator.state.sessions
        for session in list(sessions.values()):
            if now - self._seen.setdefault(session.id, now) > self._silence:
                await self._coordinator.end_session(session)
        for name in self._seen.keys() - sessions.keys():
            del self._seen[name]

    async def _create_session(self, request: web.Request, tenant: str, body: bytes) -> web.StreamResponse:
        read_body(bodies.SessionBody, read_json(body))
        sessions = self._coordinator.state.sessions.values()
        if sum(session.tenant == tenant for session in sessions) >= MAX_SESSIONS:
            raise RefusedError(f"the key has {MAX_SESSIONS} sessions; finish some", 429)
        name = uuid4().hex
        self._coordinator.open_session(name, tenant)
        return web.json_response({"type": "create_session", "session_id": name})

    async def _heartbeat(self, request: web.Request, tenant: str, body: bytes) -> web.StreamResponse:
        self._session(read_body(bodies.SessionRefBody, read_json(body)).session_id, tenant, 410)
        return web.json_response({"type": "session_heartbeat"})

    async def _finish(self, request: web.Request, tenant: str, body: bytes) -> web.StreamResponse:
        session = self._coordinator.state.sessions.get(request.match_info["id"])
        if session is not None and session.tenant == tenant:
            await self._coordinator.end_session(session)
        return web.Response(status=204)

    async def _submit(self, route: str, request: web.Request, tenant: str, body: bytes) -> web.StreamResponse:
        if self._coordinator.state.pending_bytes(tenant) + len(body) > MAX_PENDING_BYTES:
            raise RefusedError(f"the key has more than {MAX_PENDING_BYTES >> 20} MiB of requests that wait", 429)
        accepted = read_request(route, body)
        self._session(accepted.owner, tenant)
        await self._coordinator.submit(accepted, tenant)
        answer: JsonObject = {"request_id": accepted.id}
        if route == SAMPLE:
            answer["sample_sequence_ids"] = [f"{accepted.id}/{i}" for i in range(_samples(accepted.body))]
        return web.json_response(answer)

    async def _retrieve(self, request: web.Request, tenant: str, body: bytes) -> web.StreamResponse:
        name = read_body(bodies.FutureBody, read_json(body)).request_id
        result = await self._coordinator.retrieve(name, self._session(name, tenant), POLL_SECONDS)
        if result is None:
            again = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return web.json_response(again, status=408)
        content_type = "application/json" if result.is_json else "application/x-protobuf"
        return web.Response(body=result.content, content_type=content_type)

    async def _create_sampler(self, request: web.Request, tenant: str, body: bytes) -> web.StreamResponse:
        fields = read_body(bodies.SamplerBody, read_json(body))
        session = self._session(fields.session_id, tenant)
        if fields.model_path is None:
            self._folders.check_base(fields.base_model or "")
            source = SamplerSource()
        else:
            folder = self._folders.folder_of(fields.model_path, tenant)
            source = SamplerSource("/".join(folder.parts[-3:]), fields.model_path, version_of(folder))
        name = f"{session.id}:sample:{fields.sampling_session_seq_id}"
        await self._coordinator.add_sampler(name, source, session)
        return web.json_response({"type": "create_sampling_session", "sampling_session_id": name})

    async def _get_sampler(self, request: web.Request, tenant: str, body: bytes) -> web.StreamResponse:
        name = request.match_info["id"]
        source = self._session(name, tenant).samplers.get(name)
        if source is None:
            raise RefusedError(f"there is no sampling session {show(name, 80)}", 404)
        run = {} if source.folder is None else self._folders.read(source.folder.partition("/")[0])
        base = run.get("base_model", self._folders.names[0])
        return web.json_response({"sampler_id": name, "base_model": base, "model_path": source.model_path})

    async def _get_info(self, request: web.Request, tenant: str, body: bytes) -> web.StreamResponse:
        name = read_body(bodies.ModelRefBody, read_json(body)).model_id
        self._session(name, tenant)
        run = self._run(name, tenant)
        data = {"model_name": run["base_model"], "tokenizer_id": self._tokenizer}
        info = {"type": "get_info", "model_id": name, "model_data": data, "is_lora": True}
        return web.json_response({**info, "lora_rank": run["lora_config"]["rank"], "model_name": run["base_model"]})

    async def _weights_info(self, request: web.Request, tenant: str, body: bytes) -> web.StreamResponse:
        path = read_body(bodies.PathBody, read_json(body)).tinker_path
        run = self._folders.read(self._folders.folder_of(path, tenant).parent.parent.name)
        lora = {key: value for key, value in run["lora_config"].items() if key.startswith("train_")}
        info = {"base_model": run["base_model"], "is_lora": True, "lora_rank": run["lora_config"]["rank"]}
        return web.json_response({**info, **lora})

    async def _training_run(self, request: web.Request, tenant: str, body: bytes) -> web.StreamResponse:
        name = request.match_info["id"]
        run = self._run(name, tenant)
        return web.json_response(
            {
                "training_run_id": name,
                "base_model": run["base_model"],
                "model_owner": tenant,
                "is_lora": True,
                "lora_rank": run["lora_config"]["rank"],
                "last_request_time": datetime.now(UTC).isoformat(),
                "user_metadata": run["user_metadata"],
            }
        )

    async def _checkpoints(self, request: web.Request, tenant: str, body: bytes) -> web.StreamResponse:
        name = request.match_info["id"]
        self._run(name, tenant)
        return web.json_response({"checkpoints": await asyncio.to_thread(self._folders.checkpoints, name)})

    async def _delete_checkpoint(self, request: web.Request, tenant: str, body: bytes) -> web.StreamResponse:
        path = "tinker://{id}/{kind}/{name}".format(**request.match_info)
        async with self._coordinator.round:
            await asyncio.to_thread(shutil.rmtree, self._folders.folder_of(path, tenant))
        return web.Response(status=204)

    async def _usage(self, request: web.Request, tenant: str, body: bytes) -> web.StreamResponse:
        return web.json_response(self._coordinator.usage.of(tenant, self._coordinator.state.sessions))

    async def _capabilities(self, request: web.Request, tenant: str, body: bytes) -> web.StreamResponse:
        models = [{"model_name": name, "max_context_length": self._context} for name in self._folders.names]
        return web.json_response({"supported_models": models})

    def _session(self, name: str, tenant: str, status: int = 404) -> ClientSession:
        session = self._coordinator.session(name, tenant, status)
        self._seen[session.id] = asyncio.get_running_loop().time()
        return session

    def _run(self, model: str, tenant: str) -> JsonObject:
        run = self._folders.read(model)
        if run.get("tenant") != tenant:
            raise RefusedError(f"there is no model {show(model, 80)}; create another", 404)
        return run


def _samples(body: Mapping[str, object]) -> int:
    """Return the number of samples that a body asks for; 0 if it is none, which fails when the request runs."""
    count = body.get("num_samples", 1)
    return count if isinstance(count, int) and 0 <= count <= 1 << 16 else 0


def _constant(value: JsonObject) -> Answer:
    async def answer(*_: object) -> web.StreamResponse:
        return web.json_response(value)

    return answer

"""The HTTP server, on the event loop of the rollouts: sessions by their token, dialects by their path.

No session waits for another: each has requests, bytes and connections of its own, which are charged before a body is
read, and bodies become prompts in threads, one of a session at a time.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from rlkit.base.errors import RecipeError
from rlkit.base.installed import extra_command
from rlkit.interfaces.gateway import MODEL, Gateway, GatewaySession, PolicyBackend, SessionLimits
from rlkit.types import JsonObject
from rlkit_agents.body import parse_json
from rlkit_agents.chat import ChatCompletions
from rlkit_agents.connections import CLOSE_SECONDS, Connections
from rlkit_agents.dialect import Dialect
from rlkit_agents.messages import Messages
from rlkit_agents.prompt import Prepared, prepare, render
from rlkit_agents.request import RequestError
from rlkit_agents.responses import Responses
from rlkit_agents.session import AgentSession

if TYPE_CHECKING:
    from aiohttp import web

HOST = "127.0.0.1"
MOST_BYTES = 16 * 2**20
"""Of a body."""
MOST_OBJECTS = 2**17
"""In a body, lists included: messages, their parts, calls, and brackets in texts."""
BODY_SECONDS = 30.0
"""In which a body must come."""
LINGER_SECONDS = 2.0
"""In which the rest of a refused body is read, so that the agent gets its answer."""
PING_SECONDS = 10.0
WAITING = 1024
"""Connections that wait to be accepted: one at a time, so that sessions are answered between them."""
THREADS = 16
"""In which requests are read."""

Charge = Callable[[int], None]
Handler = Callable[[AgentSession, "web.Request", Dialect, Charge], Awaitable["web.StreamResponse"]]
DIALECTS: dict[str, Dialect] = {
    "chat/completions": ChatCompletions(),
    "responses": Responses(),
    "messages": Messages(),
}


class ChatGateway(Gateway):
    """Serves sessions over HTTP, in the dialects of OpenAI and of Anthropic."""

    def __init__(self) -> None:
        self._sessions: dict[str, AgentSession] = {}
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self._connections = Connections()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="rlkit-gateway")
        self.port = 0

    @property
    def url(self) -> str:
        """The address, without a path."""
        return f"http://{HOST}:{self.port}"

    async def start(self) -> None:
        """Listen, unless the gateway does; also after its listener has died.

        Raises:
            RecipeError: aiohttp is not installed.
        """
        async with self._starting:
            if self._listener is not None and self._listener.is_serving():
                return
            await self._listen()

    async def _listen(self) -> None:
        """Listen, at the address of before if there was one: agents that run try again there."""
        if self._runner is None:
            try:
                from aiohttp import web
            except ImportError as error:
                raise RecipeError(
                    f"`agent:` needs aiohttp, which is not installed: {extra_command('agents')}"
                ) from error
            self._runner = web.AppRunner(
                self._application(),
                handler_cancellation=True,
                access_log=None,
                shutdown_timeout=CLOSE_SECONDS,
                lingering_time=LINGER_SECONDS,
            )
            await self._runner.setup()
        listening = socket.create_server((HOST, self.port))
        self.port = listening.getsockname()[1]
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._accept, sock=listening, backlog=1)
        listening.listen(WAITING)

    def _accept(self) -> asyncio.Protocol:
        assert self._runner is not None
        assert self._runner.server is not None
        return self._connections.accept(self._runner.server())

    def _application(self) -> web.Application:
        from aiohttp import web

        app = web.Application()
        for prefix in ("", "/sessions/{session}"):
            for path, dialect in DIALECTS.items():
                app.router.add_post(f"{prefix}/v1/{path}", self._handler(self._sample, dialect))
                app.router.add_route("*", f"{prefix}/v1/{path}", self._handler(self._missing, dialect))
            app.router.add_post(f"{prefix}/v1/messages/count_tokens", self._handler(self._count, Messages()))
            app.router.add_get(f"{prefix}/v1/models", self._handler(self._models, ChatCompletions()))
        app.router.add_route("*", "/{path:.*}", self._handler(self._missing, ChatCompletions()))
        return app

    async def close(self) -> None:
        """End all sessions and stop to listen."""
        for session in list(self._sessions.values()):
            await session.close()
        self._sessions.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    def open(self, backend: PolicyBackend, limits: SessionLimits) -> AgentSession:
        """Return a new session, whose id is its token."""
        session = AgentSession(secrets.token_urlsafe(24), backend, limits, self._threads)
        self._sessions[session.id] = session
        return session

    async def end(self, session: GatewaySession) -> None:
        """Close a session, whose token is refused from now on."""
        opened = self._sessions.pop(session.id, None)
        if opened is not None:
            await opened.close()
            self._connections.close(opened)

    def _handler(self, handle: Handler, dialect: Dialect) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Return a handler that answers errors in the dialect's form."""

        async def answer(request: web.Request) -> web.StreamResponse:
            from aiohttp import web

            try:
                session = self._session(request)
                with session.admission.request() as charge, self._connections.used(request.protocol, session):
                    return await handle(session, request, dialect, charge)
            except RequestError as error:
                refused = error
            except ConnectionError:  # the agent has gone
                raise
            except Exception as error:
                refused = session.fail(error)
            response = web.json_response(dialect.error(refused), status=refused.status)
            if refused.status in (401, 429):
                response.force_close()  # a flood has to connect again, and few are accepted at once
            return response

        return answer

    def _session(self, request: web.Request) -> AgentSession:
        """Return the session that a request's path, or else its token, names.

        Raises:
            RequestError: There is no such session, or path and token name different ones.
        """
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        token = bearer.strip() if scheme.lower() == "bearer" else ""
        token = token or request.headers.get("x-api-key", "")
        named = request.match_info.get("session")
        session = self._sessions.get(token if named is None else named)
        if session is None or (named is not None and token != named and token in self._sessions):
            problem = "the token is of no open session; use the API key and the address that the agent was given"
            raise RequestError(problem, status=401, kind="authentication_error")
        return session

    async def _sample(
        self, session: AgentSession, request: web.Request, dialect: Dialect, charge: Charge
    ) -> web.StreamResponse:
        prepared = await session.read(partial(_prepare, session, dialect, await _body(request, charge)))
        retry, chat = request.headers.get("x-stainless-retry-count", "0") != "0", prepared.request
        from aiohttp import web

        ignored = ", ".join(chat.ignored).encode("unicode_escape").decode()  # a header is one line
        headers = {"x-rlkit-ignored": ignored[:1000]} if ignored else {}
        if not chat.stream:
            with session.ask(prepared, retry) as sampling:
                answer = await session.wait(sampling)
            return web.json_response(dialect.write(answer, chat), headers=headers)
        with session.ask(prepared, retry) as sampling:
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", **headers})
            await stream.prepare(request)
            while not sampling.done():
                await asyncio.wait((sampling,), timeout=PING_SECONDS)
                if not sampling.done():
                    await stream.write(dialect.comment)
            try:
                answer = await session.wait(sampling)
            except RequestError as error:
                await stream.write(dialect.error_event(error))
                return stream
        for event in dialect.events(answer, chat):
            await stream.write(event)
        await stream.write_eof()
        return stream

    async def _count(
        self, session: AgentSession, request: web.Request, dialect: Dialect, charge: Charge
    ) -> web.StreamResponse:
        tokens = await session.read(partial(_count_tokens, session, await _body(request, charge)))
        from aiohttp import web

        return web.json_response({"input_tokens": tokens})

    async def _models(
        self, session: AgentSession, request: web.Request, dialect: Dialect, charge: Charge
    ) -> web.StreamResponse:
        from aiohttp import web

        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rlkit"}
        return web.json_response({"object": "list", "data": [model]})

    async def _missing(
        self, session: AgentSession, request: web.Request, dialect: Dialect, charge: Charge
    ) -> web.StreamResponse:
        paths = ", ".join(f"/v1/{path}" for path in DIALECTS)
        problem = f"there is no {request.method} {request.path[:100]}; there are {paths} and /v1/models"
        raise RequestError(problem, status=404, kind="not_found_error")


async def _body(request: web.Request, charge: Charge) -> bytearray:
    """Return a request's body, whose bytes are charged as they come.

    Raises:
        RequestError: It is too long, too late, or broken.
    """
    from aiohttp import web

    body = bytearray()
    _check_size(request.content_length or 0)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.content.iter_any():
                body += chunk
                _check_size(len(body))
                charge(len(chunk))
    except web.RequestPayloadError as error:
        raise RequestError(f"the body cannot be read: {error}") from error
    except TimeoutError:
        problem = f"the body has {len(body)} bytes after {BODY_SECONDS:g} s, expected the whole body; send it again"
        raise RequestError(problem, status=408, kind="timeout_error") from None
    return body


def _check_size(count: int) -> None:
    if count > MOST_BYTES:
        raise RequestError(f"the body has more than {MOST_BYTES >> 20} MiB", status=413, kind="request_too_large")


def _prepare(session: AgentSession, dialect: Dialect, body: bytearray) -> Prepared:
    return prepare(dialect.read(_json(body), session.conversation), session.forest, session.backend)


def _count_tokens(session: AgentSession, body: bytearray) -> int:
    return len(render(session.backend, Messages().read_prompt(_json(body), session.conversation)).tokens)


def _json(body: bytearray) -> JsonObject:
    """Return the JSON object in a body.

    Raises:
        RequestError: It has none, or so many objects and lists that reading them takes seconds.
    """
    if body.count(b"{") + body.count(b"[") > MOST_OBJECTS:
        raise RequestError(f"the body has more than {MOST_OBJECTS:,} objects and lists", 413, "request_too_large")
    value = parse_json(body, "the body is")
    if not isinstance(value, dict):
        raise RequestError("the body is no JSON object")
    return value

"""The HTTP server, on the event loop of the rollouts: sessions by their token, dialects by their path."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlkit.base.errors import RecipeError
from rlkit.gateway.chat import ChatCompletions
from rlkit.gateway.dialect import Dialect
from rlkit.gateway.messages import Messages
from rlkit.gateway.request import RequestError, parse_json
from rlkit.gateway.responses import Responses
from rlkit.gateway.session import AgentSession, PolicyBackend, SessionLimits, render
from rlkit.types import JsonObject

if TYPE_CHECKING:
    from aiohttp import web

HOST = "127.0.0.1"
MODEL = "policy"
"""The name under which agents address the policy; any other is accepted too."""

MOST_BYTES = 16 * 2**20
"""Of a body."""
CONNECTIONS = 1024
"""Open requests, over all sessions: a flood waits for nobody's turn but is refused."""
PING_SECONDS = 10.0
CLOSE_SECONDS = 5.0

Handler = Callable[[AgentSession, "web.Request", Dialect], Awaitable["web.StreamResponse"]]
DIALECTS: dict[str, Dialect] = {
    "chat/completions": ChatCompletions(),
    "responses": Responses(),
    "messages": Messages(),
}


class Gateway:
    """Serves sessions on an event loop; a session is open from `open` until its `close`."""

    def __init__(self) -> None:
        self._sessions: dict[str, AgentSession] = {}
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self._requests = 0
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
                    "`agent:` needs aiohttp, which is not installed; pip install 'rlkit-fabric[agents]'"
                ) from error
            self._runner = web.AppRunner(
                self._application(), handler_cancellation=True, access_log=None, shutdown_timeout=CLOSE_SECONDS
            )
            await self._runner.setup()
        assert self._runner.server is not None
        self._listener = await asyncio.get_running_loop().create_server(self._runner.server, HOST, self.port)
        self.port = self._listener.sockets[0].getsockname()[1]

    def _application(self) -> web.Application:
        from aiohttp import web

        app = web.Application(client_max_size=MOST_BYTES)
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
        session = AgentSession(secrets.token_urlsafe(24), backend, limits)
        self._sessions[session.id] = session
        return session

    async def end(self, session: AgentSession) -> None:
        """Close a session, whose token is refused from now on."""
        self._sessions.pop(session.id, None)
        await session.close()

    def _handler(self, handle: Handler, dialect: Dialect) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Return a handler that answers errors in the dialect's form."""

        async def answer(request: web.Request) -> web.StreamResponse:
            from aiohttp import web

            try:
                with self._counted():
                    session = self._session(request)
                    return await handle(session, request, dialect)
            except RequestError as error:
                refused = error
            except web.HTTPRequestEntityTooLarge:
                refused = RequestError(f"the body has more than {MOST_BYTES >> 20} MiB", 413, "request_too_large")
            except ConnectionError:  # the agent has gone
                raise
            except Exception as error:
                refused = session.fail(error)
            return web.json_response(dialect.error(refused), status=refused.status)

        return answer

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if self._requests >= CONNECTIONS:
            raise RequestError(f"the gateway has {CONNECTIONS} requests open", status=429, kind="rate_limit_error")
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

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

    async def _sample(self, session: AgentSession, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        chat = dialect.read(await _body(request), session.conversation)
        if not chat.messages:
            raise RequestError("the body has no messages")
        retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        from aiohttp import web

        headers = {"x-rlkit-ignored": ", ".join(chat.ignored)[:1000]} if chat.ignored else {}
        if not chat.stream:
            answer = await session.answer(chat, retry)
            return web.json_response(dialect.write(answer, chat), headers=headers)
        with session.ask(chat, retry) as sampling:
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

    async def _count(self, session: AgentSession, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        assert isinstance(dialect, Messages)
        chat = dialect.read_prompt(await _body(request), session.conversation)
        from aiohttp import web

        return web.json_response({"input_tokens": len(render(session.backend, chat).tokens)})

    async def _models(self, session: AgentSession, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        from aiohttp import web

        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rlkit"}
        return web.json_response({"object": "list", "data": [model]})

    async def _missing(self, session: AgentSession, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        paths = ", ".join(f"/v1/{path}" for path in DIALECTS)
        problem = f"there is no {request.method} {request.path[:100]}; there are {paths} and /v1/models"
        raise RequestError(problem, status=404, kind="not_found_error")


async def _body(request: web.Request) -> JsonObject:
    """Return a request's body.

    Raises:
        RequestError: It is no JSON object.
    """
    from aiohttp import web

    try:
        data = await request.read()
    except web.RequestPayloadError as error:
        raise RequestError(f"the body cannot be read: {error}") from error
    body = parse_json(data, "the body is")
    if not isinstance(body, dict):
        raise RequestError("the body is no JSON object")
    return body

"""The HTTP application: keys, budgets and bodies, and errors in the form that the SDK reads."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING

from aiohttp import web

from rlkit.base.errors import explain
from rlkit_tinker.server.connections import ClientConnections
from rlkit_tinker.server.coordinator import RefusedError
from rlkit_tinker.server.journal import JournalError
from rlkit_tinker.types import RequestFailedError

if TYPE_CHECKING:
    from rlkit_tinker.server.routes import Routes

KEY = re.compile(r"tml-[!-~]{1,500}")
"""A key, as the SDK takes it."""
PREFIX = "/api/v1/"
MAX_BODY = 32 * 2**20
"""Of a body: the SDK splits data into bodies of 5 MB, unless one datum is larger."""
MAX_BODIES = 128 * 2**20
"""Of all bodies of a tenant that are being read."""
MAX_PENDING_BYTES = 512 * 2**20
"""Of all bodies of a tenant whose requests have no result."""
MAX_REQUESTS = 8192
"""The most requests of a tenant at once; a future that is waited for is one."""
BODY_SECONDS = 60.0
"""In which a body must come."""

Answer = Callable[[web.Request, str, bytes], Awaitable[web.StreamResponse]]


class BodyBudget:
    """What the requests of each tenant use at once, charged before it is read."""

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    @contextmanager
    def request(self, tenant: str, size: int) -> Iterator[None]:
        """Hold a request with a body of at most some bytes.

        Raises:
            RefusedError: The tenant has too many, or too large ones.
        """
        if self._requests[tenant] >= MAX_REQUESTS:
            raise RefusedError(f"the key has {MAX_REQUESTS} requests in flight; wait for an answer", 429)
        if self._bytes[tenant] + size > MAX_BODIES:
            raise RefusedError(f"the key has more than {MAX_BODIES >> 20} MiB of bodies in flight; wait", 429)
        self._requests[tenant] += 1
        self._bytes[tenant] += size
        try:
            yield
        finally:
            self._requests[tenant] -= 1
            self._bytes[tenant] -= size
            if not self._requests[tenant]:
                del self._requests[tenant], self._bytes[tenant]


def tenant_of(key: str) -> str:
    """Return the name of a key's tenant, from which the key cannot be computed."""
    return blake2b(key.encode(), digest_size=8).hexdigest()


class TinkerApp:
    """Serves the routes.

    Args:
        api: Answers requests.
        keys: The keys that are accepted; none for any that the SDK takes.
    """

    def __init__(self, api: Routes, keys: frozenset[str]) -> None:
        self._api = api
        self._keys = keys
        self._budget = BodyBudget()
        self._connections = ClientConnections()

    async def listen(self, runner: web.AppRunner, host: str, port: int) -> asyncio.Server:
        """Accept connections for the application of a runner that was set up.

        Raises:
            OSError: The address cannot be used.
        """
        assert runner.server is not None
        server = runner.server
        loop = asyncio.get_running_loop()
        return await loop.create_server(lambda: self._connections.accept(server()), host, port, backlog=1024)

    def build(self) -> web.Application:
        """Return the application."""
        app = web.Application()
        for (method, path), answer in self._api.table().items():
            app.router.add_route(method, PREFIX + path, self._handler(answer))
        app.router.add_route("*", "/{path:.*}", self._handler(_missing))
        return app

    def _handler(self, answer: Answer) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                tenant = self._tenant(request.headers)
                size = request.content_length
                if request.body_exists and size is None:
                    size = MAX_BODY
                charge = self._budget.request(tenant, min(size or 0, MAX_BODY + 1))
                with charge, self._connections.used(request.protocol, tenant):
                    return await answer(request, tenant, await _body(request))
            except RefusedError as error:
                status, message = error.status, str(error)
            except RequestFailedError as error:
                status, message = 400, str(error)
            except JournalError as error:
                status, message = 503, str(error)
            except (ConnectionError, web.HTTPException):
                raise
            except Exception as error:
                status, message = 500, f"the server failed: {explain(error)}"
            response = web.json_response({"detail": message}, status=status)
            if status in (401, 413):
                response.force_close()
            return response

        return handle

    def _tenant(self, headers: Mapping[str, str]) -> str:
        key = headers.get("X-API-Key", "")
        if not KEY.fullmatch(key) or (self._keys and key not in self._keys):
            expected = "one of the server's --keys" if self._keys else "a key that begins with tml-"
            raise RefusedError(f"X-API-Key is none of this server, expected {expected}; set TINKER_API_KEY", 401)
        return tenant_of(key)


async def _body(request: web.Request) -> bytes:
    """Return a request's body.

    Raises:
        RefusedError: It is too long, too late, encoded, or broken.
    """
    too_long = RefusedError(f"the body has more than {MAX_BODY >> 20} MiB; send fewer or shorter data", 413)
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise RefusedError("the body has a Content-Encoding, expected none: the server does not ask for it", 415)
    if (request.content_length or 0) > MAX_BODY:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > MAX_BODY:
                    raise too_long
    except web.RequestPayloadError as error:
        raise RefusedError(f"the body cannot be read: {error}", 400) from error
    except TimeoutError:
        raise RefusedError(f"the body has not come within {BODY_SECONDS:g} s; send it again", 408) from None
    return bytes(body)


async def _missing(request: web.Request, *_: object) -> web.StreamResponse:
    raise RefusedError(f"there is no {request.method} {request.path[:100]} on this server", 404)

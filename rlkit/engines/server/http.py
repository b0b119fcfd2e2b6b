"""HTTP calls to a server: JSON, every call with a deadline, errors with the server's own text."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rlkit.base.retry import ServiceError

if TYPE_CHECKING:
    import aiohttp

MAX_QUOTED = 2000
"""Characters of a server's response that an error message quotes."""

IDLE_SECONDS = 2.0
"""Connections idle for longer are not reused: servers close theirs (uvicorn after 5 s), possibly at that moment."""


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Ignores proxies set in the environment, as aiohttp does."""

UNREADABLE = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""Errors that reading a malformed response raises."""


class Fault(ServiceError):
    """A call to a server failed."""


class Client:
    """Calls one server.

    Args:
        url: The server's address.
        headers: Headers of every call.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = dict(headers or {})
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def move(self, url: str) -> None:
        """Call the server at another address from now on."""
        if url != self.url:
            self.close()
            self.url = url

    async def get(self, path: str, deadline: float) -> Any:
        """Return the response to a GET.

        Raises:
            Fault: No response came in time, or it was an error.
        """
        return await self._call("GET", path, None, deadline)

    async def post(self, path: str, body: object, deadline: float) -> Any:
        """Return the response to a POST of a JSON body.

        Raises:
            Fault: No response came in time, or it was an error.
        """
        return await self._call("POST", path, body, deadline)

    async def post_file(self, path: str, file: Path, deadline: float) -> Any:
        """Return the response to a POST of a file's contents.

        Raises:
            Fault: No response came in time, or it was an error.
        """
        with open(file, "rb") as contents:
            return await self._call("POST", path, None, deadline, contents)

    def post_now(self, path: str, body: object, deadline: float) -> None:
        """Post a JSON body from outside of an event loop.

        Raises:
            Fault: No response came in time, or it was an error.
        """
        headers = {"Content-Type": "application/json", **self._headers}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with _DIRECT.open(request, timeout=deadline):
                pass
        except OSError as error:
            raise Fault(f"POST {self.url}{path} failed with {type(error).__name__}: {error}") from error

    async def _call(
        self, method: str, path: str, body: object, deadline: float, contents: BinaryIO | None = None
    ) -> Any:
        import aiohttp

        call = f"{method} {self.url}{path}"
        timeout = aiohttp.ClientTimeout(total=deadline)
        try:
            request = self._open().request(method, self.url + path, json=body, data=contents, timeout=timeout)
            async with request as response:
                text = await response.text()
                if response.status != 200:
                    raise Fault(f"{call} answered {response.status}: {text[:MAX_QUOTED]}", response.status)
                is_json = response.content_type == "application/json" and text
                content = await response.json() if is_json else text
        except TimeoutError as error:
            raise Fault(f"{call} did not answer within {deadline:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Fault(f"{call} failed with {type(error).__name__}: {error}") from error
        if isinstance(content, dict) and content.get("success") is False:
            raise Fault(f"{call} answered: {str(content.get('message', content))[:MAX_QUOTED]}", 200)
        return content

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            self.close()
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
            self._loop = loop
        return self._session

    async def finish(self) -> None:
        """Close the connections, on the event loop that they were opened on."""
        session = self._session
        self._session = None
        if session is not None:
            await session.close()

    def close(self) -> None:
        """Drop the connections, from any thread."""
        session = self._session
        loop = self._loop
        self._session = None
        if session is None or loop is None or loop.is_closed():
            return
        if loop.is_running():  # in this thread or another
            self._closing = asyncio.run_coroutine_threadsafe(session.close(), loop)
        else:
            loop.run_until_complete(session.close())

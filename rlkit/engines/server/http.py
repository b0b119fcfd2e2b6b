"""Calls of a server: JSON over HTTP, every call with a deadline, errors with the server's own text."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlkit.concurrency.retry import ServiceError

if TYPE_CHECKING:
    import aiohttp

SHOWN = 2000
"""Characters of a server's answer that an error repeats."""

IDLE_SECONDS = 2.0
"""A connection idle for longer is not used again: servers close theirs (uvicorn after 5 s), maybe at that moment."""


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Ignores any proxy of the environment, as aiohttp does."""


UNREADABLE = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""What reading an answer raises that is not of the form that it should have."""


class Fault(ServiceError):
    """A call to a server failed."""


class Client:
    """Calls one server.

    Args:
        url: Its address.
        headers: Sent with every call.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = dict(headers or {})
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def get(self, path: str, deadline: float) -> Any:
        """Return the answer to a GET.

        Raises:
            Fault: There was none in time, or one with an error.
        """
        return await self._call("GET", path, None, deadline)

    async def post(self, path: str, body: Any, deadline: float) -> Any:
        """Return the answer to a POST of a JSON body.

        Raises:
            Fault: There was none in time, or one with an error.
        """
        return await self._call("POST", path, body, deadline)

    def post_now(self, path: str, body: Any, deadline: float) -> None:
        """Post from outside of an event loop.

        Raises:
            Fault: There was no answer in time, or one with an error.
        """
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json", **self._headers}
        try:
            with _DIRECT.open(urllib.request.Request(self.url + path, data, kind), timeout=deadline):
                pass
        except OSError as error:
            raise Fault(f"POST {self.url}{path} failed with {type(error).__name__}: {error}") from error

    async def _call(self, method: str, path: str, body: Any, deadline: float) -> Any:
        import aiohttp

        where = f"{method} {self.url}{path}"
        limit = aiohttp.ClientTimeout(total=deadline)
        try:
            async with self._open().request(method, self.url + path, json=body, timeout=limit) as answer:
                text = await answer.text()
                if answer.status != 200:
                    raise Fault(f"{where} answered {answer.status}: {text[:SHOWN]}", answer.status)
                found = await answer.json() if answer.content_type == "application/json" and text else text
        except TimeoutError as error:
            raise Fault(f"{where} did not answer within {deadline:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Fault(f"{where} failed with {type(error).__name__}: {error}") from error
        if isinstance(found, dict) and found.get("success") is False:
            raise Fault(f"{where} answered: {str(found.get('message', found))[:SHOWN]}", 200)
        return found

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
        """Close the connections, from the event loop that they were opened on."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def close(self) -> None:
        """Drop the connections, from anywhere."""
        session, loop, self._session = self._session, self._loop, None
        if session is None or loop is None or loop.is_closed():
            return
        if loop.is_running():  # here, or in another thread
            self._closing = asyncio.run_coroutine_threadsafe(session.close(), loop)
        else:
            loop.run_until_complete(session.close())

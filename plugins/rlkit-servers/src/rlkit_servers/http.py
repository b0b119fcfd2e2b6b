"""HTTP calls to a server: JSON, every call with a deadline, errors with the server's own text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from rlkit.base.retry import HttpClient, ServiceError, run_now

MAX_BYTES = 2**30
"""Of a response: tokens, log-probs and candidates of long completions."""

MAX_QUOTED = 2000
"""Characters of a server's response that an error message quotes."""

IDLE_SECONDS = 2.0
"""Connections idle for longer are not reused: servers close theirs (uvicorn after 5 s), possibly at that moment."""

UNREADABLE = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""Errors that reading a malformed response raises."""


class Fault(ServiceError):
    """A call to a server failed."""


class Client(HttpClient):
    """Calls one server.

    Args:
        url: The server's address.
        headers: Headers of every call.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(url.rstrip("/"), headers, max_bytes=MAX_BYTES, idle_seconds=IDLE_SECONDS)

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
        return await self._call("POST", path, json.dumps(body).encode(), deadline)

    async def post_file(self, path: str, file: Path, deadline: float) -> Any:
        """Return the response to a POST of a file's contents.

        Raises:
            Fault: No response came in time, or it was an error.
        """
        with open(file, "rb") as contents:
            return await self._call("POST", path, contents, deadline)

    def post_now(self, path: str, body: object, deadline: float) -> None:
        """Post a JSON body from outside of an event loop.

        Raises:
            Fault: No response came in time, or it was an error.
        """
        run_now(self._post_once(path, body, deadline))

    async def _post_once(self, path: str, body: object, deadline: float) -> None:
        client = Client(self.url, self._headers)  # whose connections belong to this call's event loop
        try:
            await client.post(path, body, deadline)
        finally:
            await client.finish()

    async def _call(self, method: str, path: str, body: bytes | BinaryIO | None, deadline: float) -> Any:
        call = f"{method} {self.url}{path}"
        try:
            response = await self.request(method, path, body, seconds=deadline)
        except ServiceError as error:
            raise Fault(f"{call} {error}") from error
        text = response.content.decode(errors="replace")
        if response.status != 200:
            raise Fault(f"{call} answered {response.status}: {text[:MAX_QUOTED]}", response.status)
        content: Any = text
        if text and response.headers.get("Content-Type", "").partition(";")[0].strip() == "application/json":
            try:
                content = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise Fault(f"{call} failed with {type(error).__name__}: {error}") from error
        if isinstance(content, dict) and content.get("success") is False:
            raise Fault(f"{call} answered: {str(content.get('message', content))[:MAX_QUOTED]}", 200)
        return content

"""The client of the search server: retries, and a deadline for all of them together."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import time
import urllib.error
import urllib.request
from typing import Any

from rlkit.base.errors import RecipeError
from rlkit_tool_search.index import Passage
from rlkit_tool_search.server import read_passages

START = "python -m rlkit_tool_search --corpus FILE --port PORT"


class SearchClient:
    """Searches through a server; `deadline` is in seconds, for one search with all its retries."""

    def __init__(self, url: str, retries: int, deadline: float) -> None:
        self.url = url.rstrip("/")
        self.retries = retries
        self.deadline = deadline

    def check(self) -> None:
        """Send the server a request.

        Raises:
            RecipeError: It does not answer.
        """
        try:
            self._ask("/", None, self.deadline)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise RecipeError(
                f"no search server answers at {self.url} ({error}); start one with `{START}`, or set `corpus`"
            ) from error

    async def search(self, query: str, top_k: int) -> list[Passage]:
        """Return what the server finds.

        Raises:
            ValueError: The server refuses the request; the message is its own.
            ConnectionError: No attempt succeeded; the message says how the last one failed.
        """
        body = json.dumps({"query": query, "top_k": top_k}).encode()
        begun = time.monotonic()
        for attempt in range(self.retries + 1):
            left = max(0.1, begun + self.deadline - time.monotonic())
            try:
                answer = await asyncio.wait_for(asyncio.to_thread(self._ask, "/search", body, left), left)
                return read_passages(answer)
            except urllib.error.HTTPError as error:
                if error.code < 500:  # the same request would be refused again
                    raise ValueError(f"{self.url} refused the search: {_reason(error)}") from error
                failure: Exception = error
            except (OSError, ValueError, http.client.HTTPException) as error:
                failure = error
            pause = min(0.2 * 2**attempt, 2.5) * (1 + random.random())
            if attempt == self.retries or time.monotonic() - begun + pause >= self.deadline:
                break
            await asyncio.sleep(pause)
        raise ConnectionError(
            f"no answer from {self.url} after {attempt + 1} attempts in {time.monotonic() - begun:.1f} s: {failure!r}; "
            f"is `{START}` running there?"
        ) from failure

    def _ask(self, path: str, body: bytes | None, timeout: float) -> Any:
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.load(answer)


def _reason(error: urllib.error.HTTPError) -> str:
    """Return the server's error message, if there is one."""
    body = error.read().decode(errors="replace")
    try:
        return str(json.loads(body)["error"])
    except (ValueError, TypeError, KeyError):
        return f"{error.code} {body[:200]}"

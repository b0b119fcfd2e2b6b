"""The client of the search server: retries, and a deadline for all of them together."""

from __future__ import annotations

import json

from rlkit.base.errors import RecipeError
from rlkit.base.retry import HttpClient, RetryPolicy, ServiceError, proxy_for, run_now
from rlkit_tool_search.index import Passage
from rlkit_tool_search.server import read_passages

START = "python -m rlkit_tool_search --corpus FILE --port PORT"


class SearchClient:
    """Searches through a server; `deadline` is in seconds, for one search with all its retries."""

    def __init__(self, url: str, retries: int, deadline: float) -> None:
        self.url = url.rstrip("/")
        self.policy = RetryPolicy(retries, deadline)
        self._http = self._client()

    def check(self) -> None:
        """Send the server a request.

        Raises:
            RecipeError: It does not answer.
        """
        try:
            run_now(self._check())
        except ServiceError as error:
            raise RecipeError(
                f"no search server answers at {self.url} ({error}); start one with `{START}`, or set `corpus`"
            ) from error

    def _client(self) -> HttpClient:
        return HttpClient(self.url, proxy=proxy_for(self.url))

    async def _check(self) -> None:
        client = self._client()  # whose connections belong to this call's event loop
        try:
            (await client.request("GET", "/", seconds=self.policy.request_seconds)).check()
        finally:
            await client.finish()

    async def search(self, query: str, top_k: int) -> list[Passage]:
        """Search, and return the server's results.

        Raises:
            ValueError: The server refuses the request; the message is its own.
            ConnectionError: No attempt succeeded; the message says how the last one failed.
        """
        body = json.dumps({"query": query, "top_k": top_k}).encode()

        async def attempt(seconds: float) -> list[Passage]:
            return await self._ask(body, seconds)

        try:
            return await self.policy.call(attempt)
        except ServiceError as error:
            if error.refused:  # the same request would be refused again
                raise ValueError(f"{self.url} refused the search: {error}") from error
            failure = f"after {error.attempts} attempts: {error}"
            raise ConnectionError(f"no answer from {self.url} {failure}; is `{START}` running there?") from error
        except TimeoutError as error:
            failure = f"{error}; the last attempt: {error.__cause__}"
            raise ConnectionError(f"{self.url}: {failure}; is `{START}` running there?") from error

    async def _ask(self, body: bytes, seconds: float) -> list[Passage]:
        """Return the passages of one attempt."""
        answer = await self._http.post_json("/search", body, seconds)
        try:
            return read_passages(answer)
        except ValueError as error:
            raise ServiceError(str(error)) from error

    def close(self) -> None:
        """Drop the connections."""
        self._http.close()

"""A teacher on servers that all hold the same model: log-probs of tokens, and the most likely tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, cycle
from math import isfinite
from typing import Any, TypeVar

from rlkit.base.errors import EngineError
from rlkit.base.retry import RetryPolicy, ServiceError
from rlkit.base.tasks import run_concurrently
from rlkit.interfaces.teacher import ServedTeacher, TokenSpan, TopTokens
from rlkit_servers.api import ServerApi
from rlkit_servers.http import MAX_QUOTED, UNREADABLE, Client, Fault

T = TypeVar("T")

RETRY = RetryPolicy(retries=10, request_seconds=600.0, attempt_seconds=200.0)
"""Bridges an outage of about two minutes, such as a server's restart."""

CONCURRENT_REQUESTS = 32
"""Requests in flight to each server; further ones wait here, where their deadline has not started."""


class TeacherApi(ServerApi):
    """The calls of a server that also scores tokens for a teacher, at temperature 1."""

    @abstractmethod
    async def score(self, span: TokenSpan, count: int, deadline: float) -> Any:
        """Return the response to a row, with the `count` most likely tokens at each position if that is above 0."""

    @abstractmethod
    def read_scored(self, response: Any, span: TokenSpan) -> TopTokens:
        """Return the ids and log-probs in a response of the tokens that the server has scored, from the start on."""

    @abstractmethod
    def read_top(self, response: Any, span: TokenSpan, count: int) -> list[TopTokens]:
        """Return the most likely tokens in a response, at each position from the start on."""

    async def logps(self, span: TokenSpan, deadline: float) -> list[float]:
        """Return the log-prob of each token of a span.

        Raises:
            Fault: The request failed, or the response is not complete.
        """
        response = await self.score(span, 0, deadline)
        with self._reading(response, "log-probs of the input"):
            scored = self.read_scored(response, span)
        if scored.ids != span.tokens[span.start :] or not all(map(isfinite, scored.logps)):
            raise Fault(f"{self.client.url} has scored other tokens than it was sent, or not all of them", 400)
        return scored.logps

    async def top_logps(self, span: TokenSpan, count: int, deadline: float) -> list[TopTokens]:
        """Return the `count` most likely tokens at each position of a span.

        Raises:
            Fault: The request failed, or the response is not complete.
        """
        response = await self.score(span, count, deadline)
        with self._reading(response, "the most likely tokens"):
            top = self.read_top(response, span, count)
        complete = len(top) == len(span.tokens) - span.start and all(len(set(ids)) == count for ids, _ in top)
        if not complete or not all(map(isfinite, chain.from_iterable(logps for _, logps in top))):
            raise Fault(f"{self.client.url} has not returned the {count} most likely tokens at each position", 400)
        return top

    @contextmanager
    def _reading(self, response: Any, expected: str) -> Iterator[None]:
        try:
            yield
        except UNREADABLE as error:
            raise Fault(f"{self.client.url} answered {str(response)[:MAX_QUOTED]}, expected {expected}") from error


class ServerTeacher(ServedTeacher):
    """A teacher on servers of one product; a failed request is sent to the next server.

    Args:
        urls: Addresses of the servers.
        api: Returns the calls of a server.
    """

    def __init__(self, urls: Sequence[str], api: Callable[[Client], TeacherApi]) -> None:
        self._urls = urls
        self._api = api

    async def logps(self, spans: Sequence[TokenSpan]) -> list[list[float]]:
        return await self._score(spans, lambda server, span, seconds: server.logps(span, seconds))

    async def top_logps(self, spans: Sequence[TokenSpan], count: int) -> list[list[TopTokens]]:
        return await self._score(spans, lambda server, span, seconds: server.top_logps(span, count, seconds))

    async def _score(
        self, spans: Sequence[TokenSpan], score: Callable[[TeacherApi, TokenSpan, float], Awaitable[list[T]]]
    ) -> list[list[T]]:
        clients = [Client(url) for url in self._urls]
        pending = iter(enumerate(spans))
        scores: list[list[T]] = [[] for _ in spans]

        async def attempt(servers: Iterator[TeacherApi], span: TokenSpan, seconds: float) -> list[T]:
            return await score(next(servers), span, seconds)

        async def work(first: int) -> None:
            servers = cycle([self._api(client) for client in [*clients[first:], *clients[:first]]])
            for index, span in pending:
                scores[index] = await RETRY.call(partial(attempt, servers, span))

        try:
            await run_concurrently(*(work(i % len(clients)) for i in range(CONCURRENT_REQUESTS * len(clients))))
        except (ServiceError, TimeoutError) as error:
            raise self._error(error) from error
        finally:
            for client in clients:
                await client.finish()
        return scores

    def _error(self, error: Exception) -> EngineError:
        last = f"; the last attempt: {error.__cause__}" if isinstance(error.__cause__, ServiceError) else ""
        return EngineError(
            f"the teacher's servers ({', '.join(self._urls)}) have not scored a row: {error}{last}; check that they "
            "are up and serve teacher.path with at least the context of the longest row, by the product that "
            "teacher.engine names"
        )

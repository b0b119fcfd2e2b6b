"""A teacher on SGLang servers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import TypeVar

from rlkit.base.errors import EngineError
from rlkit.base.retry import RetryPolicy, ServiceError
from rlkit.base.tasks import run_concurrently
from rlkit.engines.server.http import Client
from rlkit.engines.sglang_api import SGLangApi
from rlkit.interfaces.teacher import ServedTeacher, TokenSpan, TopTokens

T = TypeVar("T")

RETRY = RetryPolicy(retries=10, request_seconds=600.0, attempt_seconds=200.0)
"""Bridges an outage of about two minutes, such as a server's restart."""

CONCURRENT_REQUESTS = 32
"""Requests in flight to each server; further ones wait here, where their deadline has not started."""


class SGLangTeacher(ServedTeacher):
    """A teacher on SGLang servers that all hold the same model; a failed request is sent to the next server.

    Args:
        urls: Addresses of the servers.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls

    async def logps(self, spans: Sequence[TokenSpan]) -> list[list[float]]:
        return await self._score(spans, lambda server, span, seconds: server.logps(*span, seconds))

    async def top_logps(self, spans: Sequence[TokenSpan], count: int) -> list[list[TopTokens]]:
        return await self._score(spans, lambda server, span, seconds: server.top_logps(*span, count, seconds))

    async def _score(
        self, spans: Sequence[TokenSpan], score: Callable[[SGLangApi, TokenSpan, float], Awaitable[list[T]]]
    ) -> list[list[T]]:
        clients = [Client(url) for url in self._urls]
        pending = iter(enumerate(spans))
        scores: list[list[T]] = [[] for _ in spans]

        async def attempt(servers: Iterator[SGLangApi], span: TokenSpan, seconds: float) -> list[T]:
            return await score(next(servers), span, seconds)

        async def work(first: int) -> None:
            servers = cycle([SGLangApi(client) for client in [*clients[first:], *clients[:first]]])
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
            "are up and serve teacher.path with at least the context of the longest row"
        )

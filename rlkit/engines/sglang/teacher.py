"""Log-probs of a teacher that SGLang servers have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import NamedTuple, TypeVar

from rlkit.concurrency.retry import RetryPolicy, ServiceError
from rlkit.concurrency.tasks import run_concurrently
from rlkit.engines.server.http import Client
from rlkit.engines.sglang.api import SGLangApi
from rlkit.errors import EngineError

T = TypeVar("T")

RETRY = RetryPolicy(retries=10, request_seconds=600.0, attempt_seconds=200.0)
"""A server may be away for about two minutes, as for a restart."""

AT_ONCE = 32
"""Requests that are under way to each server; the others wait here, where their time does not count."""


class Span(NamedTuple):
    """A row of tokens of which those from a place on are scored; nothing predicts the first."""

    tokens: list[int]
    start: int


async def served_logps(urls: Sequence[str], spans: Sequence[Span]) -> list[list[float]]:
    """Return the log-probs of the tokens of each span from its start on, of the plain distribution (temperature 1).

    A request that fails is sent to the next server.

    Args:
        urls: Of servers with the same model.
        spans: What is scored.

    Raises:
        EngineError: A server has refused a request, or none has answered it in time.
    """
    return await _scored(urls, spans, lambda server, span, seconds: server.logps(*span, seconds))


async def served_top(
    urls: Sequence[str], spans: Sequence[Span], count: int
) -> list[list[tuple[list[int], list[float]]]]:
    """Return the ids and log-probs of the `count` most likely tokens in each place of spans; see `served_logps`."""
    return await _scored(urls, spans, lambda server, span, seconds: server.top_logps(*span, count, seconds))


async def _scored(
    urls: Sequence[str], spans: Sequence[Span], score: Callable[[SGLangApi, Span, float], Awaitable[list[T]]]
) -> list[list[T]]:
    clients = [Client(url) for url in urls]
    waiting = iter(enumerate(spans))
    found: list[list[T]] = [[] for _ in spans]

    async def attempt(servers: Iterator[SGLangApi], span: Span, seconds: float) -> list[T]:
        return await score(next(servers), span, seconds)

    async def work(first: int) -> None:
        servers = cycle([SGLangApi(client) for client in [*clients[first:], *clients[:first]]])
        for place, span in waiting:
            found[place] = await RETRY.call(partial(attempt, servers, span))

    try:
        await run_concurrently(*(work(i % len(urls)) for i in range(AT_ONCE * len(urls))))
    except (ServiceError, TimeoutError) as error:
        last = f"; the last attempt: {error.__cause__}" if isinstance(error.__cause__, ServiceError) else ""
        raise EngineError(
            f"the teacher's servers ({', '.join(urls)}) have not scored a row: {error}{last}; see that they are up "
            "and have teacher.path with at least the context of the longest row"
        ) from error
    finally:
        for client in clients:
            await client.finish()
    return found

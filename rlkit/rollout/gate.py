"""Where requests wait while the trainer learns, so that a turn may be sampled by several versions of the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from rlkit.types import Completion, Request, StopReason


class Gate:
    """Lets requests through while it is open, and knows whether any conversation could still make one.

    Used on one event loop. A conversation is *busy* while it is neither in the engine nor waiting at the gate: it reads
    an answer, or calls a tool.
    """

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._calm = asyncio.Event()
        self._calm.set()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self.busy = self.requests = 0
        """Conversations that are busy, and requests in the engine."""
        self.changed = 0.0
        """When a conversation last asked for something, had an answer or ended, by the event loop's clock."""

    @property
    def is_open(self) -> bool:
        """Whether requests are let through."""
        return self._open.is_set()

    def open(self) -> None:
        """Let requests through."""
        self._open.set()

    def close(self) -> None:
        """Hold requests back; those in the engine go on."""
        self._open.clear()

    async def calm(self) -> None:
        """Wait until no conversation is busy, nor again since one whose request was answered at once was not."""
        while self.busy:
            await self._calm.wait()

    async def quiet(self) -> None:
        """Wait until no request is in the engine."""
        await self._quiet.wait()

    def count(self, busy: int) -> None:
        """Count so many more conversations as busy."""
        self.busy += busy
        self.changed = asyncio.get_running_loop().time()
        if self.busy:
            self._calm.clear()
        else:
            self._calm.set()

    async def ask(self, request: Request, generate: Callable[[Request], Awaitable[Completion]]) -> Completion:
        """Return the complete answer to a request; after an interruption, request the rest again."""
        request, answer = replace(request, resumable=True), Completion([], [], [], StopReason.INTERRUPTED)
        self.count(-1)
        try:
            while answer.stop is StopReason.INTERRUPTED:
                await self._open.wait()
                missing = remainder(request, answer, request.sampling.max_tokens)
                self.requests += 1
                self._quiet.clear()
                try:
                    answer = answer.followed_by(await generate(missing))
                finally:
                    self.requests -= 1
                    if not self.requests:
                        self._quiet.set()
            return answer
        finally:
            self.count(1)


def remainder(request: Request, answer: Completion, max_tokens: int) -> Request:
    """Return a request for what is missing of an answer, of which there are at most `max_tokens` then."""
    tokens = (*request.tokens, *answer.tokens)
    has_routes = request.routes_from is not None and answer.tokens  # but for the last token, which was not run
    return replace(
        request,
        tokens=tokens,
        routes_from=len(tokens) - 1 if has_routes else request.routes_from,
        sampling=request.sampling.within(max_tokens - len(answer.tokens)),
        resumed=request.resumed + len(answer.tokens),
    )

"""Engines without a model, for tests of the code around an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlkit.interfaces.engine import RolloutEngine
from rlkit.types import Completion, Request, StopReason

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime, WeightStream


class FakeEngine(RolloutEngine):
    """Returns fixed texts, each token at log-prob `logp`, and records requests.

    Args:
        texts: The texts of samples 0, 1, … of a prompt, in a cycle.
        logp: The log-prob of every token.
    """

    def __init__(self, texts: list[str] | None = None, logp: float = -0.5) -> None:
        self.texts = texts or ["#### 1"]
        self.logp = logp
        self.requests: list[Request] = []
        self.synced: list[int] = []

    def bind(self, runtime: Runtime) -> None:
        self._tokenizer = runtime.tokenizer

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        await asyncio.sleep(0)
        text = self.texts[request.key.sample % len(self.texts)]
        ids = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]
        version = self.synced[-1] if self.synced else 0
        return _completion(ids, [self.logp] * len(ids), version, request.sampling.max_tokens)

    async def sync(self, stream: WeightStream, version: int) -> None:
        self.synced.append(version)


class ScriptedEngine(RolloutEngine):
    """Returns the text of a function for each turn, the i-th token at log-prob -i/8, and records requests.

    Args:
        script: Maps a request and the index of its turn to the policy's text. A text that ends with `...` is truncated
            there, without an end token.
        delay: Seconds per turn.
    """

    def __init__(self, script: Callable[[Request, int], str], delay: float = 0.0) -> None:
        self.script = script
        self.delay = delay
        self.requests: list[Request] = []
        self.version = 0
        self._turns: dict[str, int] = {}

    def bind(self, runtime: Runtime) -> None:
        self._tokenizer = runtime.tokenizer

    async def generate(self, request: Request) -> Completion:
        turn = self._turns.get(request.session, 0)
        self._turns[request.session] = turn + 1
        self.requests.append(request)
        await asyncio.sleep(self.delay)
        text = self.script(request, turn)
        ids = self._tokenizer.encode(text.removesuffix("..."), add_special_tokens=False)
        limit = request.sampling.max_tokens
        if text.endswith("..."):
            limit = min(limit, len(ids))
        ids = [*ids, self._tokenizer.eos_token_id]
        return _completion(ids, [-i / 8 for i in range(len(ids))], self.version, limit)

    async def sync(self, stream: WeightStream, version: int) -> None:
        self.version = version


def _completion(ids: list[int], logps: list[float], version: int, limit: int) -> Completion:
    """Return a completion of so many tokens, the last of which ends the turn."""
    stop = StopReason.STOP if len(ids) <= limit else StopReason.LENGTH
    return Completion(ids[:limit], logps[:limit], [version] * min(len(ids), limit), stop)

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
        stop = StopReason.STOP if len(ids) <= request.sampling.max_tokens else StopReason.LENGTH
        ids = ids[: request.sampling.max_tokens]
        return Completion(ids, [self.logp] * len(ids), [self.synced[-1] if self.synced else 0] * len(ids), stop)

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
        truncated = text.endswith("...")
        ids = self._tokenizer.encode(text.removesuffix("..."), add_special_tokens=False)
        if not truncated:
            ids = [*ids, self._tokenizer.eos_token_id]
        stop = StopReason.LENGTH if truncated or len(ids) > request.sampling.max_tokens else StopReason.STOP
        ids = ids[: request.sampling.max_tokens]
        logps = [-i / 8 for i in range(len(ids))]
        return Completion(ids, logps, [self.version] * len(ids), stop)

    async def sync(self, stream: WeightStream, version: int) -> None:
        self.version = version

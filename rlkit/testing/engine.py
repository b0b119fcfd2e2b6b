"""An engine without a model, for tests of everything around it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlkit.interfaces.engine import RolloutEngine
from rlkit.types import Completion, Request, StopReason

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime, WeightStream


class FakeEngine(RolloutEngine):
    """Answers with fixed texts in turn, each token at log-prob `logp`, and remembers what it was asked.

    Args:
        texts: What sample 0, 1, … of a prompt answers; it starts over after the last.
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
        whole = len(ids) <= request.sampling.max_tokens
        ids = ids[: request.sampling.max_tokens]
        stop = StopReason.STOP if whole else StopReason.LENGTH
        return Completion(ids, [self.logp] * len(ids), [self.synced[-1] if self.synced else 0] * len(ids), stop)

    async def sync(self, stream: WeightStream, version: int) -> None:
        self.synced.append(version)


class ScriptedEngine(RolloutEngine):
    """Answers each turn with what a function says, the i-th token of a turn at log-prob -i/8, and remembers requests.

    Args:
        script: From a request and the number of its conversation's turn, from 0, to what the policy says. A text that
            ends with `...` is cut there, without an end token.
        delay: Seconds that a turn takes.
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
        ids = [*ids, *([] if text.endswith("...") else [self._tokenizer.eos_token_id])]
        whole = len(ids) <= request.sampling.max_tokens and not text.endswith("...")
        ids = ids[: request.sampling.max_tokens]
        logps = [-i / 8 for i in range(len(ids))]
        return Completion(ids, logps, [self.version] * len(ids), StopReason.STOP if whole else StopReason.LENGTH)

    async def sync(self, stream: WeightStream, version: int) -> None:
        self.version = version

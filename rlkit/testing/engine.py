"""An engine without a model, for tests of everything around it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rlkit.roles.engine import RolloutEngine
from rlkit.types import Completion, Request, StopReason

if TYPE_CHECKING:
    from rlkit.roles.runtime import Runtime, WeightStream


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

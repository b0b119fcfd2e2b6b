"""The interface of a rollout engine: token ids in, token ids with log-probs out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from rlkit.types import Completion, Request

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime, WeightStream


class RolloutEngine(ABC):
    """Continues token ids. The caller asks for one request at a time; batching is the engine's business.

    Constructors store options; models and servers are touched in `bind` and later.
    """

    reads_policy: bool = False
    """Whether it samples from the trainer's own weights, which then have to stay on the device."""

    reserved: int = 0
    """Tokens of the model's context that it cannot fill; the run's context, and every limit, is that much less."""

    @property
    def capacity(self) -> int | None:
        """Return how many conversations it can hold at once, on this rank; None for any number."""
        return None

    @property
    def environment(self) -> Mapping[str, str]:
        """Return variables that the trainer's processes need before their first collective; set ones are kept."""
        return {}

    @abstractmethod
    def bind(self, runtime: Runtime) -> None:
        """Receive the tokenizer, the policy and the device.

        Raises:
            EngineError: The engine cannot serve this run; the message says what to choose instead.
        """

    @abstractmethod
    async def generate(self, request: Request) -> Completion:
        """Continue the request's tokens until a stop id, its budget or the context's end.

        `Completion.logps` are those of `log_softmax(logits / temperature)`, and a stop id is part of the tokens.

        Raises:
            RolloutError: This request failed; others may go on.
            TimeoutError: The request's deadline passed.
            EngineError: The engine failed and the run cannot go on.
        """

    @abstractmethod
    async def sync(self, stream: WeightStream, version: int) -> None:
        """Take the policy's weights; completions sampled afterwards carry this version."""

    @property
    def needs_weights(self) -> bool:
        """Whether it must be synced again before it samples on: it gave up the weights' memory, or lost them.

        The run looks before and while it samples, and syncs the engines of all ranks together if any needs it.
        """
        return False

    def awake(self) -> AbstractContextManager[None]:
        """Hold the engine's memory while sampling; an engine that shares a device may give it back outside.

        All ranks enter it together, and none samples any more when one leaves.
        """
        return nullcontext()

    def health(self) -> dict[str, float]:
        """Return gauges to log with the step; the run logs the largest of all ranks, so let more be worse."""
        return {}

    def close(self) -> None:
        """Free what the engine holds; called once, also after a failure."""

"""The interface of rollout engines: token ids in, token ids with log-probs out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from rlkit.errors import EngineError
from rlkit.interfaces.runtime import BoundPart
from rlkit.types import Completion, Request

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime, WeightStream


class RolloutEngine(BoundPart):
    """Continues token ids. The caller sends one request at a time; the engine batches them.

    Constructors store options; models and servers are touched in `bind` and later.
    """

    reads_policy: bool = False
    """Whether it samples from the trainer's own weights, which then stay on the device."""

    interruptible: bool = False
    """Whether it has `interrupt`, so that rollouts may run ahead of the trainer."""

    beside: bool = False
    """Whether it samples on devices of its own and takes weights in the middle of requests, so that it goes on while
    the trainer learns; rollouts may then run ahead without `interrupt`."""

    recorded: bool = False
    """Whether training takes the answers that the data set has, and the engine samples in validation alone."""

    reserved: int = 0
    """Tokens of the model's context that the engine cannot use; subtracted from the run's context and its limits."""

    @property
    def capacity(self) -> int | None:
        """Return how many conversations it can hold at once, on this rank; None for any number."""
        return None

    @property
    def environment(self) -> Mapping[str, str]:
        """Return environment variables that ranks need before their first collective; those already set are kept."""
        return {}

    @abstractmethod
    def bind(self, runtime: Runtime) -> None:
        """Connect to the run: tokenizer, policy, device.

        Raises:
            EngineError: The engine cannot serve this run; the message names the alternative.
        """

    @abstractmethod
    async def generate(self, request: Request) -> Completion:
        """Continue the request's tokens until a stop id, its budget or the context's end.

        `Completion.logps` are those of `log_softmax(logits / temperature)`, and a stop id is part of the tokens.

        Raises:
            RolloutError: This request failed; others are not affected.
            TimeoutError: The request's deadline passed.
            EngineError: The engine failed and the run cannot continue.
        """

    @abstractmethod
    async def sync(self, stream: WeightStream, version: int) -> None:
        """Load the policy's weights; completions sampled afterwards carry this version."""

    @property
    def needs_weights(self) -> bool:
        """Whether weights must be synced before more is sampled: their memory was released, or they were lost.

        Checked before and during rollouts; the engines of all ranks are synced together if any needs it.
        """
        return False

    def interrupt(self) -> None:
        """Answer all requests soon with the tokens that there are, under `StopReason.INTERRUPTED`.

        Called on the event loop of `generate`, where rollouts run ahead of the trainer on its own device.

        Raises:
            EngineError: It cannot.
        """
        raise EngineError(f"{type(self).__name__} cannot interrupt requests; set rollout.max_staleness: 0")

    def follow(self, calm: Callable[[], Awaitable[None]]) -> None:
        """Take what waits until all conversations wait for the engine: one that decodes only then is repeatable.

        Called before the first request, where rollouts run ahead of the trainer; other engines ignore it.
        """

    def on_device(self) -> AbstractContextManager[None]:
        """Keep the engine's memory allocated while sampling; an engine that shares a device may release it outside.

        All ranks enter it together, and leave it only once no rank samples any more.
        """
        return nullcontext()

    def health(self) -> dict[str, float]:
        """Return gauges to log with the step; the maximum over all ranks is logged, so larger should mean worse."""
        return {}

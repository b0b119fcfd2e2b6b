"""The calls of a server: a product's endpoints are a subclass of `ServerApi`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rlkit.engines.server.http import Client, Fault
from rlkit.engines.server.states import Step
from rlkit.types import Request


@dataclass(frozen=True)
class Answer:
    """Tokens from a server.

    Args:
        tokens: Their ids.
        logps: The log-prob of each.
        labels: The label of the weights that each was sampled from.
        stopped: Whether a stop id ended them, and not the budget.
        aborted: Whether the server was told to end them.
    """

    tokens: list[int]
    logps: list[float]
    labels: list[str] = field(default_factory=list)
    stopped: bool = False
    aborted: bool = False


class ServerApi(ABC):
    """The calls of one server; each raises `Fault` if it fails.

    Args:
        client: Sends them.
    """

    product: ClassVar[str] = "server"

    tensor_parallel = 1
    """Processes of the server over which it shards the model; each takes the weights."""

    adapter: str | None = None
    """The name of the adapters with which it samples; None for the weights alone."""

    def __init__(self, client: Client) -> None:
        self.client = client

    @abstractmethod
    async def health(self, deadline: float) -> None:
        """Return if the server is well."""

    async def inspect(self, started: bool) -> None:
        """Read what the server is, once it is well; `started` if rlkit has started it.

        Raises:
            EngineError: Its release is not supported.
        """

    @abstractmethod
    async def weight_version(self) -> str:
        """Return the label of its weights."""

    @abstractmethod
    async def generate(self, request: Request) -> Answer:
        """Continue the request's tokens by up to `max_tokens`, until one of its `stop_ids`; it has a deadline."""

    async def abort(self, deadline: float) -> None:
        """End the requests that are under way from here; each is answered with the tokens that there are."""
        raise Fault(f"{self.product} does not abort requests")

    @abstractmethod
    async def probe(self, rows: Sequence[Sequence[int]], count: int, deadline: float) -> list[Answer]:
        """Return, for each row, all its tokens but the first, then `count` likeliest ones, with all their log-probs."""

    @abstractmethod
    async def perform(self, step: Step, label: str, brackets: bool) -> None:
        """Run a step of a weight update; one that the product does not need is nothing.

        Args:
            step: Of `states.TABLE`, but for `LOAD`, `ADAPT` and `CHECK`.
            label: Of the new weights.
            brackets: Whether the transport is called between an update's begin and its end.
        """

    async def reset(self, deadline: float) -> None:
        """Leave whatever a failed update left open."""

    def release(self, deadline: float) -> None:
        """Pause and release the memory of weights and KV cache; called outside of any event loop."""
        raise Fault(f"{self.product} does not release its memory")

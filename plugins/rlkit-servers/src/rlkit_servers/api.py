"""The calls of a server: a product's endpoints are a subclass of `ServerApi`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from rlkit.ops.routes import Routers
from rlkit.types import Request, Sampling
from rlkit_servers.http import Client, Fault
from rlkit_servers.states import UpdateStep

ROUNDING = 1e-3
"""The largest probability mass by which a server's sum up to a token may differ from ours."""


@dataclass(frozen=True)
class ServerOutput:
    """Tokens that a server sampled or scored.

    Args:
        tokens: Token ids.
        logps: The log-prob of each token.
        labels: For each token, the label of the weights that sampled it.
        stopped: Whether a stop id ended the tokens, rather than the budget.
        aborted: Whether the server was told to end the request.
        candidates: For each token, the ids from which it was sampled; empty if the request has no `top_k`, or the
            server does not return them.
        expert_routes: [n,R,K] of the request's tokens from `routes_from` on and of the sampled ones; None for none.
    """

    tokens: list[int]
    logps: list[float]
    labels: list[str] = field(default_factory=list)
    stopped: bool = False
    aborted: bool = False
    candidates: list[Sequence[int]] = field(default_factory=list)
    expert_routes: torch.Tensor | None = None


class ServerApi(ABC):
    """The calls of one server; each raises `Fault` if it fails.

    Args:
        client: Sends the calls.
    """

    product: ClassVar[str] = "server"
    """The product's name in errors."""

    tensor_parallel = 1
    """Processes of the server over which the model is sharded; each of them takes the weights."""

    adapter: str | None = None
    """The name of the adapters that the server samples with; None for the weights alone."""

    routers: Routers | None = None
    """Whose choices requests with `routes_from` ask for; None if servers are not started for that."""

    def __init__(self, client: Client) -> None:
        self.client = client

    @abstractmethod
    async def health(self, deadline: float) -> None:
        """Return if the server is healthy."""

    async def inspect(self, started: bool) -> None:
        """Read the server's properties once it is healthy; `started` says whether rlkit started it.

        Raises:
            EngineError: The server's release is not supported.
        """

    @abstractmethod
    async def weight_version(self) -> str:
        """Return the label of the server's weights."""

    @abstractmethod
    async def generate(self, request: Request) -> ServerOutput:
        """Continue the request's tokens by up to `max_tokens`, until one of its `stop_ids` or its deadline."""

    async def abort(self, deadline: float) -> None:
        """End the requests in flight from here; each returns the tokens sampled so far."""
        raise Fault(f"{self.product} does not abort requests")

    @abstractmethod
    async def probe(self, rows: Sequence[Sequence[int]], count: int, deadline: float) -> list[ServerOutput]:
        """Return, for each row, its tokens after the first and then `count` greedy ones, with all their log-probs."""

    @abstractmethod
    async def perform(self, step: UpdateStep, label: str, brackets: bool) -> None:
        """Run a step of a weight update; do nothing for a step that the product does not need.

        Args:
            step: A step of `states.TRANSITIONS` other than `LOAD`, `ADAPT` and `CHECK`.
            label: The label of the new weights.
            brackets: Whether the transport sends tensors between an update's begin and its end.
        """

    async def reset(self, deadline: float) -> None:
        """Close whatever a failed update left open."""

    def release(self, deadline: float) -> None:
        """Pause, and release the memory of weights and KV cache; called outside of any event loop."""
        raise Fault(f"{self.product} does not release its memory")


def candidates_of(
    tokens: Sequence[int], ids: Sequence[Sequence[int]], logps: Sequence[Sequence[float]], sampling: Sampling
) -> tuple[list[Sequence[int]], list[float]]:
    """Return the candidates of n sampled tokens, and the log of their total probability.

    Args:
        tokens: The n sampled tokens.
        ids: For each of them the `top_k` most likely tokens, the likeliest first.
        logps: Their log-probs in the full distribution, in which tokens that a structure excludes have minus infinity.
        sampling: The limits; `top_p` is a mass of the full distribution.

    Raises:
        ValueError: A token is not among those that the limits leave.
    """
    probs = torch.tensor(logps, dtype=torch.float64).view(len(tokens), -1).exp()
    mass_before = probs.cumsum(-1) - probs
    likely = (probs >= sampling.min_p * probs[:, :1]) & (probs > 0)  # a structure excludes tokens
    is_token = torch.tensor(ids).view(probs.shape) == torch.tensor(tokens)[:, None]
    rounded = mass_before < (sampling.top_p + ROUNDING if sampling.top_p < 1 else torch.inf)
    if not (is_token & likely & rounded).any(-1).all():
        limits = f"top_p={sampling.top_p}, top_k={sampling.top_k} and min_p={sampling.min_p}"
        raise ValueError(f"a token is not among those that {limits} leave")
    present = likely & ((mass_before < sampling.top_p) | (sampling.top_p == 1) | is_token)
    chosen = [array("i", torch.tensor(row)[keep].tolist()) for row, keep in zip(ids, present, strict=True)]
    return list(chosen), (probs * present).sum(-1).log().tolist()

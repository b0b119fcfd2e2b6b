"""The interface of gateways: addresses at which agents ask the policy; a session records what it sampled."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlkit.base.errors import EngineError
from rlkit.interfaces.fields import Filled
from rlkit.interfaces.parser import ParsedTurn
from rlkit.types import Completion, Fork, JsonObject, Media, MediaSegment, Message, Rendered, StopReason, Turn

MODEL = "policy"
"""The name under which agents address the policy; any other is accepted too."""


class PolicyBackend(Protocol):
    """What a session needs of the policy: rendering, sampling and reading."""

    context: int
    """Tokens of the longest conversation."""

    def render(self, messages: Sequence[Message], tools: Sequence[JsonObject], after: Completion | None) -> Rendered:
        """Return messages as the policy reads them, ready for its turn; `after` is the turn before, None at the start.

        It is called in threads, for several sessions at once.

        Raises:
            RecipeError: The chat template cannot render them there, or the policy reads no pictures.
        """

    async def sample(
        self, tokens: Sequence[int], max_tokens: int | None, label: str, media: Media | None = None
    ) -> Completion:
        """Continue tokens, with the pictures of their placeholders; random numbers derive from the label.

        Raises:
            RolloutError: This request failed.
            EngineError: The engine failed.
        """

    def text(self, tokens: Sequence[int]) -> str:
        """Return a turn as text, with special tokens and without the one that ended it."""

    def read(self, text: str, tools: Sequence[JsonObject], prompt: Sequence[int]) -> ParsedTurn:
        """Return the text of a turn without special tokens, and its calls of tools, if there are any.

        Args:
            text: The turn, as `text` returns it.
            tools: Those that the policy may call.
            prompt: The tokens with which its prompt ends.
        """


@dataclass(frozen=True)
class SessionLimits:
    """What a session may use.

    Args:
        turns: Turns of the policy.
        tokens: Tokens that the policy samples in all of them; None for any number.
        tool_calls: Calls of tools that the policy makes; None for any number.
        concurrent: Requests at once, and idle connections.
    """

    turns: int = 64
    tokens: int | None = None
    tool_calls: int | None = None
    concurrent: int = 16


@dataclass(frozen=True)
class Sample:
    """A path from the first turn of a conversation to a last one, flat.

    Args:
        tokens: [t] Ids.
        mask: [t] True where the policy sampled the token and no sample before has it.
        logps: [t] Log-probs of the tokens under the mask, 0.0 elsewhere.
        versions: [t] Versions of the weights under the mask, -1 elsewhere.
        turns: Spans without gaps; turns of the policy that an earlier sample has are part of the first span.
        messages: The conversation.
        stop: Why the last turn ended.
        last: Ids of the last turn.
        fork: Where it leaves an earlier sample; None if they share no turn.
        positions: Indices of the turns under the mask, in the order in which they were sampled.
        media: The pictures that placeholders among the tokens stand for.
        candidates: [t] Ids from which each token under the mask was sampled, empty elsewhere.
        speaker: Number of the role whose conversation it is; 0 without roles.
        filled: Values of fields by token, in the order in which the engine filled them.
    """

    tokens: list[int]
    mask: list[bool]
    logps: list[float]
    versions: list[int]
    turns: list[Turn]
    messages: list[Message]
    stop: StopReason
    last: list[int]
    fork: Fork | None
    positions: list[int]
    media: list[MediaSegment]
    candidates: list[Sequence[int]] = field(default_factory=list)
    speaker: int = 0
    filled: list[Filled] = field(default_factory=list)


class GatewaySession(Protocol):
    """One agent's conversation, or conversations, with the policy.

    Args:
        id: A secret: who has it may use the session.
        counts: Events for the metrics.
        fatal: Raised by the engine, which ends the run.
        failed: Set with `fatal`.
    """

    id: str
    counts: Counter[str]
    fatal: EngineError | None
    failed: asyncio.Event

    @property
    def error(self) -> str | None:
        """Why the policy did not answer a request, unless it did after a retry."""

    @property
    def forks(self) -> int:
        """Turns that continue what another turn continues already, or start another conversation of the same role."""

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[JsonObject], max_tokens: int | None, speaker: int
    ) -> Message:
        """Return the policy's next message as OpenAI's chat completions have it, in a role by its number, 0 for none.

        Raises:
            RlkitError: The request is refused; the message says why.
        """

    def samples(self) -> list[Sample]:
        """Return the samples, in the order of roles; each turn is under the mask of exactly one sample."""


class Gateway(ABC):
    """Serves sessions on an event loop; a session is open from `open` until its `end`.

    A package registers an implementation as it registers a part; it takes no arguments.
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """The address, without a path; `/v1` after it is the base URL of OpenAI's clients."""

    @abstractmethod
    async def start(self) -> None:
        """Listen, unless the gateway does.

        Raises:
            RecipeError: A package is not installed.
        """

    @abstractmethod
    def open(self, backend: PolicyBackend, limits: SessionLimits) -> GatewaySession:
        """Return a new session, whose id is its token."""

    @abstractmethod
    async def end(self, session: GatewaySession) -> None:
        """Close a session, whose token is refused from now on."""

    @abstractmethod
    async def close(self) -> None:
        """End all sessions and stop to listen."""

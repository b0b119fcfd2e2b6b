"""A policy without a model: a token a character, and turns from a script."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rlkit_agents.forest import Forest
from rlkit_agents.request import ChatRequest, assistant
from rlkit_agents.session import AgentSession

from rlkit.base.errors import RecipeError
from rlkit.interfaces.content import pictures_of
from rlkit.interfaces.gateway import SessionLimits
from rlkit.interfaces.parser import ParsedTurn
from rlkit.parsers.hermes import HermesParser
from rlkit.types import Completion, JsonObject, Media, MediaSegment, Message, Rendered, StopReason

END = "\x03"


class FakePolicy:
    """Answers with the next of its texts, or the same for equal labels; renders a message as `role:content` and END."""

    def __init__(self, *texts: str, context: int = 10_000) -> None:
        self.texts = list(texts)
        self.context = context
        self.sampled: list[str] = []
        self.media: list[Media | None] = []
        self.hold: asyncio.Event | None = None
        self.fail: Callable[[], Exception | None] = lambda: None
        self.no_deltas = False

    def render(self, messages: Sequence[Message], tools: Sequence[JsonObject], after: Completion | None) -> Rendered:
        if after is not None and self.no_deltas:
            raise RecipeError("renders earlier turns anew")
        calls = "".join(str(message.get("tool_calls", "")) for message in messages)
        text = "".join(f"{message['role']}:{message['content']}{END}" for message in messages) + calls
        tokens = list(map(ord, ("" if after else str(tools)) + text + "assistant:"))
        pictures = tuple(pictures_of(messages))
        return Rendered(tokens, MediaSegment({}, pictures, len(tokens)) if pictures else None)

    async def sample(
        self, tokens: Sequence[int], max_tokens: int | None, label: str, media: Media | None = None
    ) -> Completion:
        self.media.append(media)
        self.sampled.append("".join(map(chr, tokens)))
        if self.hold is not None:
            await self.hold.wait()
        error = self.fail()
        if error is not None:
            raise error
        text = (self.texts.pop(0) if self.texts else f"turn {len(self.sampled)}") + END
        stop = StopReason.STOP if max_tokens is None or len(text) <= max_tokens else StopReason.LENGTH
        ids = list(map(ord, text[:max_tokens]))
        return Completion(ids, [-i / 64 for i in range(1, len(ids) + 1)], [3] * len(ids), stop)

    def text(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens)).removesuffix(END)

    def read(self, text: str, tools: Sequence[JsonObject], prompt: Sequence[int]) -> ParsedTurn:
        return HermesParser().parse(text) if tools else ParsedTurn(text)


def session_of(*texts: str, limits: SessionLimits | None = None) -> AgentSession:
    """Return a session of a policy that writes these texts."""
    return AgentSession("secret-of-a-session", FakePolicy(*texts), limits or SessionLimits())


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def tree(forest: Forest) -> list[int | None]:
    """Return each turn's parent, in the order of commits."""
    return [node.parent for node in forest.nodes]


async def ask(session: AgentSession, *messages: Message, **options: object) -> Message:
    """Return the policy's turn as a message."""
    answer = await session.answer(ChatRequest(list(messages), **options))  # type: ignore[arg-type]
    return answer.message()


__all__ = ["END", "FakePolicy", "ask", "assistant", "session_of", "tree", "user"]

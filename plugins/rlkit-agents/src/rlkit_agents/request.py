"""A request to the policy in the form that all dialects are read into, and the answer that they are written from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlkit.base.errors import RlkitError, shorten
from rlkit.types import JsonObject, Message

Finish = Literal["stop", "length", "tool_calls", "stop_sequence"]


class RequestError(RlkitError):
    """A request that the gateway refuses.

    Args:
        message: What was sent, and what was expected.
        status: The HTTP status.
        kind: The kind of error as the SDKs know it.
        code: A code that agents may look for, such as `context_length_exceeded`.
    """

    def __init__(
        self, message: str, status: int = 400, kind: str = "invalid_request_error", code: str | None = None
    ) -> None:
        super().__init__(shorten(message))
        self.status = status
        self.kind = kind
        self.code = code


@dataclass(frozen=True)
class Call:
    """A call of a tool.

    Args:
        id: What the tool's result refers to.
        name: The tool.
        arguments: By name.
    """

    id: str
    name: str
    arguments: JsonObject


@dataclass
class ChatRequest:
    """A request for the policy's next turn.

    Args:
        messages: The conversation, as chat templates read it.
        tools: Schemas of functions, as chat templates show them.
        calls: Whether the policy may call the tools.
        max_tokens: Most tokens of the turn; None for the run's limit.
        stop: Texts that end the turn and are not part of it.
        stream: Whether the answer is sent as events.
        usage: Whether a stream of OpenAI's chat dialect ends with the number of tokens.
        model: The name under which the policy was addressed.
        ignored: Names of the options that have no effect, since the run decides how it samples.
        speaker: Number of the role whose conversation it is, from 1; 0 without roles.
    """

    messages: list[Message]
    tools: list[JsonObject] = field(default_factory=list)
    calls: bool = True
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    model: str = ""
    ignored: tuple[str, ...] = ()
    speaker: int = 0

    def history(self) -> list[str]:
        """Return a digest of the role, the tools and the first n messages, for each n from 0 to all."""
        digests = [digest(str(self.speaker or ""), json.dumps(self.tools, sort_keys=True))]
        for message in self.messages:
            digests.append(digest(digests[-1], canonical(message)))
        return digests

    def fingerprint(self, conversation: str) -> str:
        """Return a digest of all that determines the answer, besides chance, with that of the conversation."""
        return digest(conversation, json.dumps([self.calls, self.max_tokens, self.stop]))


@dataclass(frozen=True)
class Answer:
    """A turn of the policy, as an agent reads it.

    Args:
        id: Name of the turn in its session.
        text: The text without the calls.
        calls: Calls of tools.
        finish: Why the turn ended.
        stop_text: The text that ended it, if one of the request's did.
        prompt_tokens: Tokens that the policy read.
        completion_tokens: Tokens that it sampled.
        created: Seconds since 1970.
    """

    id: str
    text: str
    calls: tuple[Call, ...]
    finish: Finish
    stop_text: str | None
    prompt_tokens: int
    completion_tokens: int
    created: int

    def message(self) -> Message:
        """Return the turn as a message of the conversation that follows."""
        return assistant(self.text, self.calls)


def assistant(text: str, calls: Sequence[Call] = ()) -> Message:
    """Return a turn of the policy as chat templates read it."""
    message: Message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message


def canonical(message: Message) -> str:
    """Return the key by which messages are equal: ids of calls and blanks around texts do not count."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return json.dumps([message["role"], _content(message["content"]), message.get("name"), calls], sort_keys=True)


def _content(content: str | list[JsonObject]) -> str | list[str | list[str]]:
    """Return the key by which contents are equal: texts without outer blanks, and pictures by their files."""
    if isinstance(content, str):
        return content.strip()
    return [part["text"].strip() if part["type"] == "text" else ["picture", part["image"].digest] for part in content]


def digest(before: str, text: str) -> str:
    """Return a digest of a text and of all that came before it."""
    return hashlib.blake2b(f"{before}\x1f{text}".encode("utf-8", "replace"), digest_size=16).hexdigest()


def name_results(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which each result of a tool has the name of the tool that was called under its id.

    Raises:
        RequestError: A result refers to no call before it.
    """
    names: dict[str, str] = {}
    named = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        call_id = message.get("tool_call_id")
        if call_id is None:
            named.append(message)
            continue
        if call_id not in names:
            raise RequestError(f"a tool's result has the id {call_id!r}, which no call before it has")
        named.append({**message, "name": names[call_id]})
    return named

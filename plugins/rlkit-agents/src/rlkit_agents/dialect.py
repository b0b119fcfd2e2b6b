"""What a dialect of a provider's API does: read bodies, write answers, events and errors."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from rlkit.types import JsonObject
from rlkit_agents.body import of_type, optional
from rlkit_agents.request import Answer, ChatRequest, RequestError

Recall = Callable[[str], ChatRequest]
"""Returns the conversation up to an earlier answer of the session, with its tools, by the answer's id."""

DELTA = 40
"""Characters of a text in one event of a stream."""


class Dialect(ABC):
    """A provider's form of requests and answers."""

    comment = b": ping\n\n"
    """Keeps a connection open while a turn is sampled."""

    @abstractmethod
    def read(self, body: JsonObject, recall: Recall) -> ChatRequest:
        """Return a body as a request.

        Raises:
            RequestError: It is none, or asks for what the policy does not do.
        """

    @abstractmethod
    def write(self, answer: Answer, request: ChatRequest) -> JsonObject:
        """Return an answer as a body."""

    @abstractmethod
    def events(self, answer: Answer, request: ChatRequest) -> Iterator[bytes]:
        """Yield an answer as server-sent events, in the provider's order."""

    def error(self, error: RequestError) -> JsonObject:
        """Return an error as a body; the form is OpenAI's."""
        return {"error": {"message": str(error), "type": error.kind, "param": None, "code": error.code}}

    def error_event(self, error: RequestError) -> bytes:
        """Return an error as the last event of a stream."""
        return event(self.error(error))


def event(data: JsonObject, name: str | None = None) -> bytes:
    """Return a server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def pieces(text: str) -> list[str]:
    """Return a text in pieces, none for an empty one."""
    return [text[start : start + DELTA] for start in range(0, len(text), DELTA)]


def ignored(body: JsonObject, read: set[str], choice: object) -> tuple[str, ...]:
    """Return the names of a body's options without effect: the run decides, or the policy must not be forced to call.

    Args:
        body: The body.
        read: The options that have an effect.
        choice: How the body wants tools to be chosen, such as "auto".
    """
    names = {name for name, value in body.items() if name not in read and value is not None}
    return tuple(sorted(names if choice in ("auto", "none") else names | {"tool_choice"}))


def messages_of(body: JsonObject) -> list[object]:
    """Return the messages of a body.

    Raises:
        RequestError: They are no list, or there are none.
    """
    messages: list[object] = of_type(required(body, "messages"), list, "messages")
    if not messages:
        raise RequestError("messages is empty, expected at least one")
    return messages


def tools_of(body: JsonObject) -> list[object]:
    """Return the tools of a body.

    Raises:
        RequestError: They are no list.
    """
    return optional(body.get("tools"), [], "tools")


def tool_choice(body: JsonObject) -> object:
    """Return the tool choice of a request in OpenAI's form, such as "auto".

    Raises:
        RequestError: It is neither a text nor an object.
    """
    choice = of_type("auto" if body.get("tool_choice") is None else body["tool_choice"], (str, dict), "tool_choice")
    return choice if isinstance(choice, str) else choice.get("type")


def required(body: JsonObject, name: str) -> Any:
    """Return a value of a body.

    Raises:
        RequestError: The body has none.
    """
    if body.get(name) is None:
        raise RequestError(f"the body has no {name!r}")
    return body[name]

"""Chat messages and tools in the columns of rows: the one boundary through which they pass, whatever file they are in.

What data sets write in several ways has one form behind it: messages with `role` and `content`, calls with arguments
that are objects, tools as names or schemas, and `trained: False` in turns that their flags leave out of the loss.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rlkit.base.errors import RecipeError
from rlkit.interfaces.rows import LocatedRow
from rlkit.types import JsonObject, Message, Row
from rlkit_tasks.json_text import checked_text, decode
from rlkit_tasks.messages import Change, MessageReader, refuse, unpacked

MESSAGES = 'chat messages such as [{"role": "user", "content": "2 + 2?"}]'

CONVERSATIONS = ("messages", "conversations", "conversation")
"""Columns of complete conversations."""

LIKE_MESSAGES = re.compile(
    r"""\s*\[?\s*\{\s*["'](role|from|content|value|tool_calls|reasoning_content|weight|train|loss)["']\s*:"""
)
NAMES_A_ROLE = re.compile(r"""["'](role|from)["']\s*:""")


class ChatRow:
    """A row whose messages and tools are read through one boundary.

    Args:
        row: The columns.
        location: Where the row is, for messages.
    """

    def __init__(self, row: Row, location: str = "row") -> None:
        self.row = row
        self.location = location
        self.reader = MessageReader(keep_nulls=isinstance(row, LocatedRow) and row.as_written)
        self._conversation: list[Message] | None = None

    @property
    def changes(self) -> list[str]:
        """What was normalised so far."""
        return sorted(self.reader.changes)

    def prompt(self, value: object, column: str) -> list[Message]:
        """Return the messages before the policy's turn: those in a column, or the user's with a text.

        Raises:
            RecipeError: It is neither, or ends with a turn of the assistant, which nobody answers.
        """
        what = f"{self.location}: {column!r}"
        messages = self._read(value, what, "user")
        if not messages:
            refuse(what, value, f"text, or {MESSAGES}")
        if messages[-1]["role"] == "assistant":
            raise RecipeError(
                f"{what} ends with a turn of the assistant, after which the chat template would begin another one; "
                "remove that turn, or ask for such a beginning in the user's message"
            )
        return context(messages)

    def answer(self, value: object, column: str) -> list[Message]:
        """Return the messages of an answer: those in a column, or one with a text; none where it is neither.

        Raises:
            RecipeError: They are messages, but malformed.
        """
        value = [value] if isinstance(value, Mapping) else value
        return self._read(value, f"{self.location}: {column!r}", "assistant")

    def answers(self, column: str) -> list[list[Message]] | None:
        """Return the messages of several answers; None where a column has no list."""
        value, what = self.row.get(column), f"{self.location}: {column!r}"
        if isinstance(value, str) and value.lstrip().startswith("["):
            value = decode(value, what)
            self.reader.changes.add(Change.MESSAGES)
        value = unpacked(value)
        return [self.answer(item, column) for item in value] if isinstance(value, list) else None

    def conversation(self) -> list[Message]:
        """Return the messages of a complete conversation; none where the row has no such column.

        Raises:
            RecipeError: The column holds something else.
        """
        if self._conversation is None:
            self._conversation = self._complete()
        return self._conversation

    def tools(self) -> list[str | JsonObject] | None:
        """Return the tools of the row's conversations: names of the recipe's, or schemas; None for all of the recipe's.

        Raises:
            RecipeError: They are neither.
        """
        value, what = self.row.get("tools"), f"{self.location}: 'tools'"
        if value is None or value == "" or value != value:  # noqa: PLR0124 (NaN, for none in tables of numbers)
            return None
        if isinstance(value, str):
            value = decode(value, what)
            self.reader.changes.add(Change.TOOLS)
        value = unpacked(value)
        if isinstance(value, Mapping) and not {"function", "parameters"} & value.keys():
            return [str(name) for name, arguments in value.items() if arguments is not None]
        if not isinstance(value, list | tuple):
            refuse(what, value, "a list of tools: names, or schemas such as {'type': 'function', 'function': …}")
        tools = [self.reader.tool(tool, f"{what}, element {number}") for number, tool in enumerate(value, 1)]
        names = [tool_name(tool) for tool in tools]
        if len({*names}) < len(names):
            refuse(what, names, "each name once")
        return tools

    def _complete(self) -> list[Message]:
        for column in CONVERSATIONS:
            value, what = self.row.get(column), f"{self.location}: {column!r}"
            messages = self._read(value, what, None)
            if messages:
                system = self.row.get("system")  # as ShareGPT's and LLaMA-Factory's rows have it
                if column != "messages" and isinstance(system, str) and system and messages[0]["role"] != "system":
                    text = checked_text(system, f"{self.location}: 'system'")
                    messages.insert(0, {"role": "system", "content": text})
                return messages
            if column == "messages" and value is not None and value != []:
                refuse(what, value, MESSAGES)
        return []

    def _read(self, value: object, what: str, author: str | None) -> list[Message]:
        """Return messages; those of the `author` with a text; none for a value of another kind."""
        if isinstance(value, str):
            if not (LIKE_MESSAGES.match(value) and NAMES_A_ROLE.search(value)):
                text = checked_text(value, what)
                return [{"role": author, "content": text}] if author == "user" or (author and text) else []
            value = decode(value, f"{what} looks like messages, but")
            value = [value] if isinstance(value, Mapping) and author == "assistant" else value
            self.reader.changes.add(Change.MESSAGES)
            if not isinstance(value, list):
                refuse(what, value, MESSAGES)
        value = unpacked(value)
        if isinstance(value, Mapping):
            refuse(what, value, f"a list of {MESSAGES}")
        if not isinstance(value, list | tuple) or not any(map(_is_object, value)):
            return []
        messages: list[Message] = []
        for number, item in enumerate(value, 1):
            message, is_call = self.reader.message(item, f"{what}, message {number}")
            last = messages[-1] if messages else message
            if is_call and last is not message and last["role"] == "assistant":
                if last.get("trained") != message.get("trained"):
                    refuse(f"{what}, message {number}", item, "the flag of the turn that it belongs to")
                last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
            else:
                messages.append(message)
        return messages


def context(messages: Sequence[Message]) -> list[Message]:
    """Return messages as context: without the mark of turns that are not trained."""
    return [{key: value for key, value in message.items() if key != "trained"} for message in messages]


def tool_name(tool: str | JsonObject) -> str:
    """Return the name of a tool, which is the tool itself or in its schema."""
    return tool if isinstance(tool, str) else str(tool["function"]["name"])


def _is_object(value: object) -> bool:
    """Whether an element of a list is an object, or the JSON text of one that has a role."""
    return isinstance(value, Mapping) or (
        isinstance(value, str) and bool(LIKE_MESSAGES.match(value) and NAMES_A_ROLE.search(value))
    )

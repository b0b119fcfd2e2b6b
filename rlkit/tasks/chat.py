"""Chat messages and tools in the columns of rows: the one boundary through which they pass, whatever file they are in.

What data sets write in several ways has one form behind it: messages with `role` and `content`, calls with arguments
that are objects, tools as names or schemas, and `trained: False` in turns that their flags leave out of the loss.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NoReturn

from rlkit.base.errors import RecipeError, show
from rlkit.tasks.json_text import checked_text, cleaned, decode
from rlkit.tasks.table import LocatedRow
from rlkit.types import JsonObject, Message, Row

MESSAGES = 'chat messages such as [{"role": "user", "content": "2 + 2?"}]'

ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")
"""Roles that chat templates read."""

OTHER_ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "function": "tool", "observation": "tool", "tool_response": "tool", "function_response": "tool",
}  # fmt: skip
"""Names of roles in ShareGPT, LLaMA-Factory, ms-swift and OpenAI's older API, and those of chat templates."""

CALLS = ("function_call", "tool_call")
"""Roles of messages whose content is the JSON text of calls."""

FLAGS = ("trained", "train", "trainable", "loss", "loss_weight", "weight")
"""Keys by which messages say whether they are trained: those of axolotl, tinker, ms-swift, LLaMA-Factory, OpenAI."""

CONVERSATIONS = ("messages", "conversations", "conversation")
"""Columns of complete conversations."""

LIKE_MESSAGES = re.compile(
    r"""\s*\[?\s*\{\s*["'](role|from|content|value|tool_calls|reasoning_content|weight|train|loss)["']\s*:"""
)
NAMES_A_ROLE = re.compile(r"""["'](role|from)["']\s*:""")


class Change(StrEnum):
    """What was normalised in a row."""

    MESSAGES = "messages decoded from JSON text"
    ARGUMENTS = "arguments decoded from JSON text"
    TOOLS = "tools decoded from JSON text"
    NULLS = "nulls dropped"
    ROLES = "roles mapped"
    CALLS = "calls read from a message"
    UNTRAINED = "turns without loss"


class ChatRow:
    """A row whose messages and tools are read through one boundary.

    Args:
        row: The columns.
        location: Where the row is, for messages.
    """

    def __init__(self, row: Row, location: str = "row") -> None:
        self.row = row
        self.location = location
        self.changes: set[Change] = set()
        self._keep_nulls = isinstance(row, LocatedRow) and row.as_written
        self._conversation: list[Message] | None = None

    def prompt(self, value: object, column: str) -> list[Message]:
        """Return the messages before the policy's turn: those in a column, or the user's with a text.

        Raises:
            RecipeError: It is neither.
        """
        messages = self._read(value, f"{self.location}: {column!r}", "user")
        if not messages:
            self._refuse(f"{self.location}: {column!r}", value, f"text, or {MESSAGES}")
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
            self.changes.add(Change.MESSAGES)
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
            self.changes.add(Change.TOOLS)
        value = unpacked(value)
        if isinstance(value, Mapping) and not {"function", "parameters"} & value.keys():
            return [str(name) for name, arguments in value.items() if arguments is not None]
        if not isinstance(value, list | tuple):
            self._refuse(what, value, "a list of tools: names, or schemas such as {'type': 'function', 'function': …}")
        tools = [self._tool(tool, f"{what}, element {number}") for number, tool in enumerate(value, 1)]
        names = [tool_name(tool) for tool in tools]
        if len({*names}) < len(names):
            self._refuse(what, names, "each name once")
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
                self._refuse(what, value, MESSAGES)
        return []

    def _read(self, value: object, what: str, author: str | None) -> list[Message]:
        """Return messages; those of the `author` with a text; none for a value of another kind."""
        if isinstance(value, str):
            if not (LIKE_MESSAGES.match(value) and NAMES_A_ROLE.search(value)):
                text = checked_text(value, what)
                return [{"role": author, "content": text}] if author == "user" or (author and text) else []
            value = decode(value, f"{what} looks like messages, but")
            value = [value] if isinstance(value, Mapping) and author == "assistant" else value
            self.changes.add(Change.MESSAGES)
            if not isinstance(value, list):
                self._refuse(what, value, MESSAGES)
        value = unpacked(value)
        if isinstance(value, Mapping):
            self._refuse(what, value, f"a list of {MESSAGES}")
        if not isinstance(value, list | tuple) or not any(map(_is_object, value)):
            return []
        messages: list[Message] = []
        for number, item in enumerate(value, 1):
            message, is_call = self._message(item, f"{what}, message {number}")
            last = messages[-1] if messages else message
            if is_call and last is not message and last["role"] == "assistant":
                if last.get("trained") != message.get("trained"):
                    self._refuse(f"{what}, message {number}", item, "the flag of the turn that it belongs to")
                last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
            else:
                messages.append(message)
        return messages

    def _message(self, value: object, what: str) -> tuple[Message, bool]:
        """Return a message, and whether it is one of calls alone, which belong to the assistant's turn before it."""
        value = self._decoded(value, what, Change.MESSAGES)
        if not isinstance(value, Mapping):
            self._refuse(what, value, "an object with role and content")
        fields = {str(key): unpacked(item) for key, item in value.items() if item is not None}
        if value.keys() - fields.keys() - {"content"}:
            self.changes.add(Change.NULLS)
        role = self._one_of(fields, "role", "from", what)
        content = self._one_of(fields, "content", "value", what)
        known = self._role(role, what)
        is_call = known in CALLS
        message: Message = {"role": "assistant" if is_call else known}
        trained = self._trained(fields, message["role"], what)
        if is_call:
            calls = self._decoded(content, f"{what}: content", Change.CALLS)
            message |= {"content": "", "tool_calls": self._calls(calls, f"{what}: content")}
            return message | ({} if trained else {"trained": False}), True
        legacy = fields.pop("function_call", None)
        calls = fields.pop("tool_calls", None) or ([] if legacy is None else [legacy])
        if "content" in value or content is not None:
            message["content"] = content
        self._check_content(message, bool(calls), what)
        if calls:
            message["tool_calls"] = self._calls(self._decoded(calls, f"{what}: tool_calls", Change.CALLS), what)
        for key, item in fields.items():
            message[key] = self._cleaned(item, f"{what}: {key}")
        return message | ({} if trained else {"trained": False}), False

    def _one_of(self, fields: JsonObject, key: str, other: str, what: str) -> object:
        """Remove and return a field that has one of two names.

        Raises:
            RecipeError: Both are there, and differ.
        """
        values = [fields.pop(name) for name in (key, other) if name in fields]
        if len(values) == 2 and values[0] != values[1]:
            raise RecipeError(f"{what} has {key}={show(values[0])} and {other}={show(values[1])}; remove one")
        return values[0] if values else None

    def _role(self, role: object, what: str) -> str:
        name = role.strip().lower().replace("-", "_") if isinstance(role, str) else ""
        known = OTHER_ROLES.get(name, name)
        if known not in (*ROLES, *CALLS):
            names = ", ".join((*ROLES, *OTHER_ROLES, *CALLS))
            self._refuse(f"{what}: role", role, f"one of {names}")
        if known != role:
            self.changes.add(Change.ROLES)
        return known

    def _check_content(self, message: Message, calls: bool, what: str) -> None:
        """Check a content: a text, a list of typed parts, or nothing beside calls.

        Raises:
            RecipeError: It is something else.
        """
        content = message.get("content")
        if isinstance(content, str):
            checked_text(content, f"{what}: content")
        elif isinstance(content, list) and all(
            isinstance(part, Mapping) and isinstance(part.get("type"), str) for part in content
        ):
            message["content"] = [{key: item for key, item in part.items() if item is not None} for part in content]
        elif content is not None or not calls:
            self._refuse(f"{what}: content", content, "text, typed parts, or null beside tool_calls")

    def _calls(self, value: object, what: str) -> list[JsonObject]:
        calls = value if isinstance(value, list | tuple) else [value]
        return [self._call(call, f"{what}, call {number}") for number, call in enumerate(calls, 1)]

    def _call(self, value: object, what: str) -> JsonObject:
        """Return a call of a tool in OpenAI's form, with arguments that are an object."""
        value = self._decoded(value, what, Change.CALLS)
        fields = self._fields(value, what)
        bare = "function" not in fields
        function = fields if bare else self._fields(self._decoded(fields["function"], what, Change.CALLS), what)
        name, arguments = function.pop("name", None), function.pop("arguments", None)
        if not isinstance(name, str) or not name:
            self._refuse(what, value, "a call such as {'function': {'name': 'add', 'arguments': {'a': 1}}}")
        what = f"{what}: arguments of {name!r}"
        if isinstance(arguments, str) and arguments:
            arguments, _ = cleaned(decode(arguments, what), what, keep_nulls=True)
            self.changes.add(Change.ARGUMENTS)
        elif not arguments:
            arguments = {} if arguments in (None, "", {}) else arguments
        else:
            arguments = self._cleaned(arguments, what)
        if not isinstance(arguments, dict):
            self._refuse(what, arguments, "an object, or the JSON text of one")
        others = {} if bare else {key: self._cleaned(item, what) for key, item in function.items()}
        outer = {key: self._cleaned(item, what) for key, item in fields.items() if key != "function"}
        return {**outer, "type": "function", "function": {"name": name, **others, "arguments": arguments}}

    def _tool(self, value: object, what: str) -> str | JsonObject:
        """Return a name, or a schema in OpenAI's form."""
        if isinstance(value, str) and value and not value.lstrip().startswith("{"):
            return value
        value = self._cleaned(self._decoded(value, what, Change.TOOLS), what)
        function = value.get("function") if isinstance(value, dict) and "function" in value else value
        is_function = isinstance(value, dict) and value.get("type", "function") == "function"
        if not is_function or not isinstance(function, dict) or not _is_function(function):
            self._refuse(what, value, "a name, or {'type': 'function', 'function': {'name': …, 'parameters': {…}}}")
        parameters = function.get("parameters", {})
        if isinstance(parameters, str):
            parameters, _ = cleaned(decode(parameters, f"{what}: parameters"), what, keep_nulls=True)
            self.changes.add(Change.TOOLS)
            function = {**function, "parameters": parameters}
        if not isinstance(parameters, dict):
            self._refuse(f"{what}: parameters of {function['name']!r}", parameters, "an object: a JSON schema")
        if function is value:
            function = {key: item for key, item in function.items() if key != "type"}
            return {"type": "function", "function": function}
        return {**value, "type": "function", "function": function}

    def _trained(self, fields: JsonObject, role: str, what: str) -> bool:
        """Remove the flags of a message; return whether its tokens are in the loss.

        Raises:
            RecipeError: A flag is neither true nor false, two differ, or one is on a turn that nobody trains.
        """
        if fields.pop("train_detail", None):
            raise RecipeError(f"{what} has train_detail, but parts of a turn cannot be left out of the loss; remove it")
        flags = {name: fields.pop(name) for name in FLAGS if name in fields}
        for name, flag in flags.items():
            if not isinstance(flag, int | float) or flag not in (0, 1):
                self._refuse(f"{what}: {name}", flag, "0 or 1, or false or true: a turn is in the loss, or it is not")
        if len(set(map(bool, flags.values()))) > 1:
            self._refuse(what, flags, "flags that agree")
        trained = all(flags.values())
        if role != "assistant" and flags and trained:
            self._refuse(what, {"role": role, **flags}, "the flag on turns of the assistant alone: others are context")
        if role == "assistant" and not trained:
            self.changes.add(Change.UNTRAINED)
        return trained or role != "assistant"

    def _decoded(self, value: object, what: str, change: Change) -> object:
        if not isinstance(value, str):
            return value
        self.changes.add(change)
        return decode(value, what)

    def _cleaned(self, value: object, what: str) -> object:
        plain, dropped = cleaned(value, what, keep_nulls=self._keep_nulls)
        if dropped:
            self.changes.add(Change.NULLS)
        return plain

    def _fields(self, value: object, what: str) -> JsonObject:
        if not isinstance(value, Mapping):
            self._refuse(what, value, "an object")
        if None in value.values():
            self.changes.add(Change.NULLS)
        return {str(key): unpacked(item) for key, item in value.items() if item is not None}

    @staticmethod
    def _refuse(what: str, value: object, expected: str) -> NoReturn:
        raise RecipeError(f"{what} is {show(value)}, expected {expected}")


def context(messages: Sequence[Message]) -> list[Message]:
    """Return messages as context: without the mark of turns that are not trained."""
    return [{key: value for key, value in message.items() if key != "trained"} for message in messages]


def unpacked(value: object) -> object:
    """Return a value with lists and numbers of Python in the place of NumPy's."""
    return value.tolist() if hasattr(value, "tolist") else value


def tool_name(tool: str | JsonObject) -> str:
    """Return the name of a tool, which is the tool itself or in its schema."""
    return tool if isinstance(tool, str) else str(tool["function"]["name"])


def _is_function(function: JsonObject) -> bool:
    return isinstance(function.get("name"), str) and bool(function["name"])


def _is_object(value: object) -> bool:
    """Whether an element of a list is an object, or the JSON text of one that has a role."""
    return isinstance(value, Mapping) or (
        isinstance(value, str) and bool(LIKE_MESSAGES.match(value) and NAMES_A_ROLE.search(value))
    )

"""One chat message or tool of a row, as data sets write it, in its one form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NoReturn

from rlkit.base.errors import RecipeError, show
from rlkit.tasks.json_text import checked_text, cleaned, decode
from rlkit.types import JsonObject, Message

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


class Change(StrEnum):
    """What was normalised in a row."""

    MESSAGES = "messages decoded from JSON text"
    ARGUMENTS = "arguments decoded from JSON text"
    TOOLS = "tools decoded from JSON text"
    NULLS = "nulls dropped"
    ROLES = "roles mapped"
    CALLS = "calls read from a message"
    UNTRAINED = "turns without loss"


@dataclass
class MessageReader:
    """Reads messages and tools of a row.

    Args:
        keep_nulls: Whether nulls in arguments and schemas are those of the data set, not those of a table.
        changes: What was normalised.
    """

    keep_nulls: bool
    changes: set[Change] = field(default_factory=set)

    def message(self, value: object, what: str) -> tuple[Message, bool]:
        """Return a message, and whether it is one of calls alone, which belong to the assistant's turn before it."""
        value = self.decoded(value, what, Change.MESSAGES)
        if not isinstance(value, Mapping):
            refuse(what, value, "an object with role and content")
        fields = {str(key): unpacked(item) for key, item in value.items() if item is not None}
        if value.keys() - fields.keys() - {"content"}:
            self.changes.add(Change.NULLS)
        role = _one_of(fields, "role", "from", what)
        content = _one_of(fields, "content", "value", what)
        known = self._role(role, what)
        is_call = known in CALLS
        message: Message = {"role": "assistant" if is_call else known}
        trained = self._trained(fields, message["role"], what)
        if is_call:
            calls = self.decoded(content, f"{what}: content", Change.CALLS)
            message |= {"content": "", "tool_calls": self._calls(calls, f"{what}: content")}
            return message | ({} if trained else {"trained": False}), True
        legacy = fields.pop("function_call", None)
        calls = fields.pop("tool_calls", None) or ([] if legacy is None else [legacy])
        if "content" in value or content is not None:
            message["content"] = content
        _check_content(message, bool(calls), what)
        if calls:
            message["tool_calls"] = self._calls(self.decoded(calls, f"{what}: tool_calls", Change.CALLS), what)
        for key, item in fields.items():
            message[key] = self._cleaned(item, f"{what}: {key}")
        return message | ({} if trained else {"trained": False}), False

    def _role(self, role: object, what: str) -> str:
        name = role.strip().lower().replace("-", "_") if isinstance(role, str) else ""
        known = OTHER_ROLES.get(name, name)
        if known not in (*ROLES, *CALLS):
            names = ", ".join((*ROLES, *OTHER_ROLES, *CALLS))
            refuse(f"{what}: role", role, f"one of {names}")
        if known != role:
            self.changes.add(Change.ROLES)
        return known

    def _calls(self, value: object, what: str) -> list[JsonObject]:
        calls = value if isinstance(value, list | tuple) else [value]
        return [self._call(call, f"{what}, call {number}") for number, call in enumerate(calls, 1)]

    def _call(self, value: object, what: str) -> JsonObject:
        """Return a call of a tool in OpenAI's form, with arguments that are an object."""
        value = self.decoded(value, what, Change.CALLS)
        fields = self._fields(value, what)
        bare = "function" not in fields
        function = fields if bare else self._fields(self.decoded(fields["function"], what, Change.CALLS), what)
        name, arguments = function.pop("name", None), function.pop("arguments", None)
        if not isinstance(name, str) or not name:
            refuse(what, value, "a call such as {'function': {'name': 'add', 'arguments': {'a': 1}}}")
        what = f"{what}: arguments of {name!r}"
        if isinstance(arguments, str) and arguments:
            arguments, _ = cleaned(decode(arguments, what), what, keep_nulls=True)
            self.changes.add(Change.ARGUMENTS)
        elif not arguments:
            arguments = {} if arguments in (None, "", {}) else arguments
        else:
            arguments = self._cleaned(arguments, what)
        if not isinstance(arguments, dict):
            refuse(what, arguments, "an object, or the JSON text of one")
        others = {} if bare else {key: self._cleaned(item, what) for key, item in function.items()}
        outer = {key: self._cleaned(item, what) for key, item in fields.items() if key != "function"}
        return {**outer, "type": "function", "function": {"name": name, **others, "arguments": arguments}}

    def tool(self, value: object, what: str) -> str | JsonObject:
        """Return a name, or a schema in OpenAI's form."""
        if isinstance(value, str) and value and not value.lstrip().startswith("{"):
            return value
        value = self._cleaned(self.decoded(value, what, Change.TOOLS), what)
        function = value.get("function") if isinstance(value, dict) and "function" in value else value
        is_function = isinstance(value, dict) and value.get("type", "function") == "function"
        if not is_function or not isinstance(function, dict) or not _is_function(function):
            refuse(what, value, "a name, or {'type': 'function', 'function': {'name': …, 'parameters': {…}}}")
        parameters = function.get("parameters", {})
        if isinstance(parameters, str):
            parameters, _ = cleaned(decode(parameters, f"{what}: parameters"), what, keep_nulls=True)
            self.changes.add(Change.TOOLS)
            function = {**function, "parameters": parameters}
        if not isinstance(parameters, dict):
            refuse(f"{what}: parameters of {function['name']!r}", parameters, "an object: a JSON schema")
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
                refuse(f"{what}: {name}", flag, "0 or 1, or false or true: a turn is in the loss, or it is not")
        if len(set(map(bool, flags.values()))) > 1:
            refuse(what, flags, "flags that agree")
        trained = all(flags.values())
        if role != "assistant" and flags and trained:
            refuse(what, {"role": role, **flags}, "the flag on turns of the assistant alone: others are context")
        if role == "assistant" and not trained:
            self.changes.add(Change.UNTRAINED)
        return trained or role != "assistant"

    def decoded(self, value: object, what: str, change: Change) -> object:
        if not isinstance(value, str):
            return value
        self.changes.add(change)
        return decode(value, what)

    def _cleaned(self, value: object, what: str) -> object:
        plain, dropped = cleaned(value, what, keep_nulls=self.keep_nulls)
        if dropped:
            self.changes.add(Change.NULLS)
        return plain

    def _fields(self, value: object, what: str) -> JsonObject:
        if not isinstance(value, Mapping):
            refuse(what, value, "an object")
        if None in value.values():
            self.changes.add(Change.NULLS)
        return {str(key): unpacked(item) for key, item in value.items() if item is not None}


def refuse(what: str, value: object, expected: str) -> NoReturn:
    """Raise a RecipeError about a value of a row."""
    raise RecipeError(f"{what} is {show(value)}, expected {expected}")


def unpacked(value: object) -> object:
    """Return a value with lists and numbers of Python in the place of NumPy's."""
    return value.tolist() if hasattr(value, "tolist") else value


def _one_of(fields: JsonObject, key: str, other: str, what: str) -> object:
    """Remove and return a field that has one of two names.

    Raises:
        RecipeError: Both are there, and differ.
    """
    values = [fields.pop(name) for name in (key, other) if name in fields]
    if len(values) == 2 and values[0] != values[1]:
        raise RecipeError(f"{what} has {key}={show(values[0])} and {other}={show(values[1])}; remove one")
    return values[0] if values else None


def _check_content(message: Message, calls: bool, what: str) -> None:
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
        refuse(f"{what}: content", content, "text, typed parts, or null beside tool_calls")


def _is_function(function: JsonObject) -> bool:
    return isinstance(function.get("name"), str) and bool(function["name"])

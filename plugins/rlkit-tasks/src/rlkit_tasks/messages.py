"""One chat message or tool of a row, as data sets write it, in its one form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NoReturn

from rlkit.base.errors import RecipeError, show
from rlkit.types import JsonObject, Message
from rlkit_tasks.json_text import checked_text, cleaned, decode

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


TOOL = "a name, or {'type': 'function', 'function': {'name': …, 'parameters': {…}}}"
"""What a row's tool is."""


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
        if value.keys() == {"role", "content"} and value["role"] in ROLES and isinstance(value["content"], str):
            checked_text(value["content"], f"{what}: content")
            return dict(value), False  # the most usual form, in which nothing is left to do
        fields = {str(key): unpacked(item) for key, item in value.items() if item is not None}
        if value.keys() - fields.keys() - {"content"}:
            self.changes.add(Change.NULLS)
        role = _one_of(fields, "role", "from", what)
        content = _one_of(fields, "content", "value", what)
        canonical = self._role(role, what)
        is_call = canonical in CALLS
        message: Message = {"role": "assistant" if is_call else canonical}
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
        canonical = OTHER_ROLES.get(name, name)
        if canonical not in (*ROLES, *CALLS):
            names = ", ".join((*ROLES, *OTHER_ROLES, *CALLS))
            refuse(f"{what}: role", role, f"one of {names}")
        if canonical != role:
            self.changes.add(Change.ROLES)
        return canonical

    def _calls(self, value: object, what: str) -> list[JsonObject]:
        calls = value if isinstance(value, list | tuple) else [value]
        return [self._call(call, f"{what}, call {number}") for number, call in enumerate(calls, 1)]

    def _call(self, value: object, what: str) -> JsonObject:
        """Return a call of a tool in OpenAI's form, with arguments that are an object."""
        call = self._fields(self.decoded(value, what, Change.CALLS), what)
        if "function" not in call:
            envelope: JsonObject = {key: call.pop(key) for key in ("id", "type") if key in call}
            call = {"type": "function", **envelope, "function": call}
        function = self._fields(self.decoded(call["function"], what, Change.CALLS), what)
        name, arguments = function.get("name"), function.get("arguments", "")
        if not isinstance(name, str) or not name:
            refuse(what, value, "a call such as {'function': {'name': 'add', 'arguments': {'a': 1}}}")
        what = f"{what}: arguments of {name!r}"
        if arguments == "":
            arguments = {}
        elif isinstance(arguments, str):
            arguments = self._from_text(arguments, what, Change.ARGUMENTS)
        else:
            arguments = self._cleaned(arguments, what)
        if not isinstance(arguments, dict):
            refuse(what, arguments, "an object, or the JSON text of one")
        function = {key: self._cleaned(item, what) for key, item in function.items() if key != "arguments"}
        call = {key: item if key == "function" else self._cleaned(item, what) for key, item in call.items()}
        return {**call, "function": {**function, "arguments": arguments}}

    def tool(self, value: object, what: str) -> str | JsonObject:
        """Return a name, or a schema in OpenAI's form."""
        if isinstance(value, str) and value and not value.lstrip().startswith("{"):
            return value
        schema = self._cleaned(self.decoded(value, what, Change.TOOLS), what)
        if not isinstance(schema, dict) or schema.get("type", "function") != "function":
            refuse(what, value, TOOL)
        if "function" not in schema:
            schema = {"function": {key: item for key, item in schema.items() if key != "type"}}
        schema = schema if "type" in schema else {"type": "function", **schema}
        function = schema["function"]
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            refuse(what, value, TOOL)
        parameters = function.get("parameters", {})
        if isinstance(parameters, str):
            parameters = self._from_text(parameters, f"{what}: parameters", Change.TOOLS)
            schema["function"] = {**function, "parameters": parameters}
        if not isinstance(parameters, dict):
            refuse(f"{what}: parameters of {function['name']!r}", parameters, "an object: a JSON schema")
        return schema

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

    def _from_text(self, text: str, what: str, change: Change) -> object:
        """Return the value of a JSON text, whose nulls are those of the data set."""
        self.changes.add(change)
        return cleaned(decode(text, what), what, keep_nulls=True)[0]

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


def _one_of(fields: JsonObject, key: str, alias: str, what: str) -> object:
    """Remove and return a field that has one of two names.

    Raises:
        RecipeError: Both are there, and differ.
    """
    values = [fields.pop(name) for name in (key, alias) if name in fields]
    if len(values) == 2 and values[0] != values[1]:
        raise RecipeError(f"{what} has {key}={show(values[0])} and {alias}={show(values[1])}; remove one")
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

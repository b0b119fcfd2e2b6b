"""Values in the bodies of requests: each has the type and the form that is expected, or the request is refused."""

from __future__ import annotations

import json
from typing import Any, TypeVar, cast

from rlkit.base.errors import shorten
from rlkit.types import JsonObject
from rlkit_agents.request import RequestError

V = TypeVar("V")

DEEPEST = 64
"""Levels of objects and lists in a body, or in a call's arguments."""


def of_type(value: object, expected: type | tuple[type, ...], what: str) -> Any:
    """Return a value of a body that must have a type.

    Raises:
        RequestError: It has another one.
    """
    types = expected if isinstance(expected, tuple) else (expected,)
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        names = " or ".join(JSON_NAMES[kind] for kind in types)
        raise RequestError(f"{what} is {shorten(repr(value), 80)}, expected {names}")
    return value


JSON_NAMES: dict[type, str] = {
    dict: "an object", list: "a list", str: "a string", int: "an integer", bool: "true or false", type(None): "null",
}  # fmt: skip


def optional(value: object, default: V, what: str) -> V:
    """Return a value of a body that must have the default's type; the default for null.

    Raises:
        RequestError: It has another type.
    """
    return default if value is None else cast(V, of_type(value, type(default), what))


def parse_json(text: str | bytearray, what: str) -> object:
    """Return a JSON value.

    Raises:
        RequestError: The text is no JSON, or its values are nested too deeply to be rendered and logged.
    """
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{what} no JSON: {error}") from error
    level = [value]
    for _ in range(DEEPEST):
        nested = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]
        level = [child for children in nested for child in children]
    if level:
        raise RequestError(f"{what} nested too deeply, expected at most {DEEPEST} levels")
    return value


def token_limit(value: object, what: str) -> int | None:
    """Return the largest number of tokens that a body asks for, if it does.

    Raises:
        RequestError: It is no positive integer.
    """
    if value is None:
        return None
    limit: int = of_type(value, int, what)
    if limit < 1:
        raise RequestError(f"{what} is {limit}, expected 1 or more")
    return limit


def stop_texts(value: object, what: str) -> tuple[str, ...]:
    """Return the texts that end a turn.

    Raises:
        RequestError: They are not texts, one is empty, or there are more than 16.
    """
    texts = [value] if isinstance(value, str) else [] if value is None else of_type(value, list, what)
    for text in texts:
        if not of_type(text, str, f"an element of {what}"):
            raise RequestError(f"{what} has an empty text")
    if len(texts) > 16:
        raise RequestError(f"{what} has {len(texts)} texts, expected at most 16")
    return tuple(texts)


def text_of(content: object, what: str) -> str:
    """Return a content as one text: of a string, null, or a list of typed parts with texts.

    Raises:
        RequestError: It is none of these, or has a part without a text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in of_type(content, (list, str), what):
        kind = of_type(part, dict, f"a part of {what}").get("type")
        if kind not in ("text", "input_text", "output_text"):
            raise RequestError(f"{what} has a part of type {kind!r}; the policy reads parts of type 'text' alone")
        texts.append(of_type(part.get("text"), str, f"the text of {what}"))
    return "".join(texts)


def arguments_of(value: object, what: str) -> JsonObject:
    """Return the arguments of a call, be they an object or the JSON text of one.

    Raises:
        RequestError: They are neither.
    """
    if isinstance(value, str):
        value = parse_json(value or "{}", f"{what} are")
    arguments: JsonObject = of_type(value, dict, what)
    return arguments


def function_schema(name: object, description: object, parameters: object) -> JsonObject:
    """Return the schema of a tool as chat templates show it.

    Raises:
        RequestError: It has no name, its description is no text, or its parameters are no object.
    """
    if not of_type(name, str, "the name of a tool"):
        raise RequestError("a tool has an empty name")
    text = optional(description, "", f"the description of tool {name!r}")
    schema: JsonObject = optional(parameters, {}, f"the schema of tool {name!r}")
    return {
        "type": "function",
        "function": {"name": name, "description": text, "parameters": schema},
    }


def function_tool(value: object, key: str | None = None) -> JsonObject:
    """Return the schema of a tool of OpenAI's, whose function is the value of a key, or the tool itself.

    Raises:
        RequestError: It is no tool, or none of the agent's own.
    """
    tool = of_type(value, dict, "an element of tools")
    if tool.get("type") != "function":
        raise RequestError(f"a tool has the type {tool.get('type')!r}, expected 'function'")
    function = tool if key is None else of_type(tool.get(key), dict, "the function of a tool")
    return function_schema(function.get("name"), function.get("description"), function.get("parameters"))

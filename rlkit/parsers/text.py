"""What the parsers share: finding calls in a text, reading JSON out of it, and saying what is wrong with a call.

The policy reads what is wrong as a tool's reply, so messages are the same for the same text, and their own words hold
no control token, which a tokenizer would take for one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from rlkit.interfaces.parser import ParsedTurn, ToolCall

Reading = tuple[list[ToolCall], int]
"""The calls that begin somewhere, and where what follows them begins."""

_DECODER = json.JSONDecoder()
_BLANKS = re.compile(r"\s*")
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]*)"')
_STEPS = dict.fromkeys("[({", 1) | dict.fromkeys("])}", -1)
_EXCERPT = 160


class Malformed(NamedTuple):
    """A text in the place of JSON, and why it is none."""

    given: str
    why: str


def scan(text: str, opening: re.Pattern[str], read: Callable[[str, re.Match[str]], Reading]) -> ParsedTurn:
    """Read calls wherever `opening` matches; what is not read, or gives no call, is the text."""
    calls: list[ToolCall] = []
    kept: list[str] = []
    position = 0
    while (match := opening.search(text, position)) is not None:
        found, end = read(text, match)
        kept.append(text[position : match.start() if found else end])
        calls += found
        position = end
    return ParsedTurn("".join([*kept, text[position:]]).strip(), calls)


def decode(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value at `start`, blanks aside, and where what follows it and its blanks begins.

    Raises:
        ValueError: There is none; the message says why.
    """
    start = _after_blanks(text, start)
    try:
        value, end = _DECODER.raw_decode(text, start)
        return plain(value), _after_blanks(text, end)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos - start}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def plain(value: Any) -> Any:
    """Return the value as JSON would bring it back.

    Raises:
        ValueError: It holds NaN, an infinity or half a surrogate pair.
        TypeError: It holds something else that JSON cannot say.
    """
    return json.loads(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())


def read_json(text: str, start: int, edge: re.Pattern[str]) -> tuple[Any, int]:
    """Return the JSON value, or `Malformed`, that ends where `edge` matches or the text ends; and the edge's end."""
    try:
        value, end = decode(text, start)
        if end == len(text):
            return value, end
        if (closing := edge.match(text, end)) is not None:
            return value, closing.end()
        why = "more follows the JSON"
    except ValueError as error:
        why = str(error)
    stop, end = find_edge(text, start, edge)
    return Malformed(text[start:stop].strip(), why), end


def find_edge(text: str, start: int, edge: re.Pattern[str]) -> tuple[int, int]:
    """Return where the next edge begins and ends: the end of the text if there is none."""
    found = edge.search(text, start)
    return found.span() if found else (len(text), len(text))


def balanced(text: str, start: int, quotes: str = '"') -> int:
    """Return where the bracket at `start` is closed, strings aside: the end of the text if it never is."""
    strings = "|".join(rf"{q}[^{q}\\]*(?:\\.[^{q}\\]*)*{q}?" for q in quotes)
    depth = 0
    for mark in re.compile(rf"{strings}|[][(){{}}]", re.DOTALL).finditer(text, start):
        depth += _STEPS.get(mark.group(), 0)
        if depth == 0:
            return mark.end()
    return len(text)


def to_call(value: Any, key: str) -> ToolCall:
    """Make a call of what should be a JSON object with a name and, under `key`, the arguments."""
    expected = f'a JSON object {{"name": "...", "{key}": {{...}}}}'
    if isinstance(value, Malformed):
        name = _NAME.search(value.given)
        return failed(name[1] if name else "", value.given, value.why, expected)
    given = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict):
        return failed("", given, "it is no object", expected)
    name, arguments = value.get("name"), value.get(key)
    if not isinstance(name, str) or not name:
        return failed("", given, '"name" is missing or no string', expected)
    if not isinstance(arguments, dict):
        return failed(name, given, f'"{key}" is missing or no object', expected)
    return ToolCall(name, arguments)


def named_call(name: str, value: Any) -> ToolCall:
    """Make a call of a name and what should be the JSON object of its arguments."""
    if name and isinstance(value, dict):
        return ToolCall(name, value)
    if not isinstance(value, Malformed):
        value = Malformed(json.dumps(value, ensure_ascii=False), "the arguments are no object")
    why = value.why if name else "the name is missing"
    return failed(name, value.given, why, "a name, then its arguments as a JSON object")


def failed(name: str, given: str, why: str, expected: str) -> ToolCall:
    """Make a call that says what was given, why it is none, and what was expected."""
    excerpt = given if len(given) <= _EXCERPT else f"{given[:_EXCERPT]}..."
    return ToolCall(name, error=f"cannot read the call {excerpt!r}: {why}; expected {expected}")


def _after_blanks(text: str, start: int) -> int:
    blanks = _BLANKS.match(text, start)
    return blanks.end() if blanks else start

"""Shared by the parsers: finding calls in a text, reading JSON in it, and describing malformed calls.

The policy reads what is wrong as a tool's reply, so messages are the same for the same text, and their own words hold
no control token, which a tokenizer would take for one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from rlkit.interfaces.parser import ParsedTurn, ToolCall

Reading = tuple[list[ToolCall], int]
"""The calls at a position, and the position after them."""

_DECODER = json.JSONDecoder()
_BLANKS = re.compile(r"\s*")
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]*)"')
_STEPS = dict.fromkeys("[({", 1) | dict.fromkeys("])}", -1)
_EXCERPT = 160


class Malformed(NamedTuple):
    """Text where JSON was expected, and why it is not JSON."""

    text: str
    why: str


def scan(text: str, opening: re.Pattern[str], read: Callable[[str, re.Match[str]], Reading]) -> ParsedTurn:
    """Read calls wherever `opening` matches; all else is the text."""
    calls: list[ToolCall] = []
    texts: list[str] = []
    position = 0
    match = opening.search(text, position)
    while match is not None:
        read_calls, end = read(text, match)
        texts.append(text[position : match.start() if read_calls else end])
        calls += read_calls
        position = end
        match = opening.search(text, position)
    return ParsedTurn("".join([*texts, text[position:]]).strip(), calls)


def decode(text: str, start: int) -> tuple[object, int]:
    """Return the JSON value at `start` and the position after it, skipping blanks before and after.

    Raises:
        ValueError: There is none, or it is malformed.
    """
    start = _after_blanks(text, start)
    try:
        value, end = _DECODER.raw_decode(text, start)
        return plain(value), _after_blanks(text, end)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos - start}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def plain(value: object) -> object:
    """Return the value after a round trip through JSON.

    Raises:
        ValueError: It holds NaN, an infinity or half a surrogate pair.
        TypeError: It holds something that JSON cannot represent.
    """
    return json.loads(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())


def read_json(text: str, start: int, edge: re.Pattern[str]) -> tuple[object, int]:
    """Return the JSON value, or `Malformed`, before the next match of `edge` or the end; and the edge's end."""
    try:
        value, end = decode(text, start)
        if end == len(text):
            return value, end
        closing = edge.match(text, end)
        if closing is not None:
            return value, closing.end()
        why = "more follows the JSON"
    except ValueError as error:
        why = str(error)
    stop, end = find_edge(text, start, edge)
    return Malformed(text[start:stop].strip(), why), end


def find_edge(text: str, start: int, edge: re.Pattern[str]) -> tuple[int, int]:
    """Return the span of the next edge; the end of the text if there is none."""
    match = edge.search(text, start)
    return match.span() if match else (len(text), len(text))


def balanced(text: str, start: int, quotes: str = '"') -> int:
    """Return where the bracket at `start` is closed, ignoring strings; the end of the text if it never is."""
    strings = "|".join(rf"{q}[^{q}\\]*(?:\\.[^{q}\\]*)*{q}?" for q in quotes)
    depth = 0
    for mark in re.compile(rf"{strings}|[][(){{}}]", re.DOTALL).finditer(text, start):
        depth += _STEPS.get(mark.group(), 0)
        if depth == 0:
            return mark.end()
    return len(text)


def to_call(value: object, key: str) -> ToolCall:
    """Return a call from what should be a JSON object with a name and, under `key`, the arguments."""
    expected = f'a JSON object {{"name": "...", "{key}": {{...}}}}'
    if isinstance(value, Malformed):
        name = _NAME.search(value.text)
        return failed(name[1] if name else "", value.text, value.why, expected)
    excerpt = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict):
        return failed("", excerpt, "it is not an object", expected)
    name, arguments = value.get("name"), value.get(key)
    if not isinstance(name, str) or not name:
        return failed("", excerpt, '"name" is missing or not a string', expected)
    if not isinstance(arguments, dict):
        return failed(name, excerpt, f'"{key}" is missing or not an object', expected)
    return ToolCall(name, arguments)


def named_call(name: str, value: object) -> ToolCall:
    """Return a call from a name and what should be the JSON object of its arguments."""
    if name and isinstance(value, dict):
        return ToolCall(name, value)
    if not isinstance(value, Malformed):
        value = Malformed(json.dumps(value, ensure_ascii=False), "the arguments are no object")
    why = value.why if name else "the name is missing"
    return failed(name, value.text, why, "a name, then its arguments as a JSON object")


def failed(name: str, text: str, why: str, expected: str) -> ToolCall:
    """Return a call whose error has an excerpt of the text, the reason, and what was expected."""
    excerpt = text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}..."
    return ToolCall(name, error=f"cannot read the call {excerpt!r}: {why}; expected {expected}")


def _after_blanks(text: str, start: int) -> int:
    blanks = _BLANKS.match(text, start)
    return blanks.end() if blanks else start

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
from rlkit.types import JsonObject

Reading = tuple[list[ToolCall], int]
"""The calls at a position, and the position after them."""

_BLANKS = re.compile(r"\s*")
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]*)"')
BRACKETS = dict.fromkeys("[({", 1) | dict.fromkeys("])}", -1)
"""How each bracket changes the depth of nesting."""
_EXCERPT = 160
_WINDOW = 1024
"""Characters that are first read as JSON; then eight times as many each time."""
_LONGEST_TOKEN = 16
"""Characters at the end of a window that may be the beginning of a number, a word or an escape."""


class Malformed(NamedTuple):
    """Text where JSON was expected, and why it is not JSON."""

    text: str
    why: str


class NotJsonError(ValueError):
    """A text is not JSON.

    Args:
        why: What is wrong.
        end: Up to where it was read.
    """

    def __init__(self, why: str, end: int) -> None:
        super().__init__(why)
        self.end = end


TOOL_CALL_EDGE = re.compile(r"</tool_call>|(?=<tool_call>)")
"""Matches where a call in `<tool_call>` ends at the latest."""


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
        NotJsonError: There is none, or it is malformed.
    """
    start = _after_blanks(text, start)
    size = _WINDOW
    while True:  # an error of `json` takes time by the length of its text
        window, cut = text[start : start + size], start + size < len(text)
        size *= 8
        try:
            value, length = _DECODER.raw_decode(window)
            if cut and length == len(window):
                continue
            return plain(value), _after_blanks(text, start + length)
        except json.JSONDecodeError as error:
            if cut and (error.msg.startswith("Unterminated") or error.pos > len(window) - _LONGEST_TOKEN):
                continue
            raise NotJsonError(f"{error.msg.removesuffix(' at')} at character {error.pos}", start + error.pos) from None
        except RecursionError:
            problem = "it is nested too deeply"
        except ValueError as error:
            problem = str(error)
        raise NotJsonError(problem, balanced(text, start) if text.startswith(("{", "["), start) else start)


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


def balanced(text: str, start: int, quotes: str = '"', limit: int | None = None) -> int:
    """Find the end of the bracket at `start`, ignoring strings; the limit or end of the text if it never closes."""
    strings = "|".join(rf"{q}[^{q}\\]*(?:\\.[^{q}\\]*)*{q}?" for q in quotes)
    depth, end = 0, len(text) if limit is None else limit
    for mark in re.compile(rf"{strings}|[][(){{}}]", re.DOTALL).finditer(text, start, end):
        depth += BRACKETS.get(mark.group(), 0)
        if depth == 0:
            return mark.end()
    return end


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


def failed(name: str, text: str, why: str, expected: str) -> ToolCall:
    """Return a call whose error has an excerpt of the text, the reason, and what was expected."""
    excerpt = text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}..."
    return ToolCall(name, error=f"cannot read the call {excerpt!r}: {why}; expected {expected}")


def _unique(pairs: list[tuple[str, object]]) -> JsonObject:
    """Return an object of JSON.

    Raises:
        ValueError: A key comes twice.
    """
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} comes twice")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def _after_blanks(text: str, start: int) -> int:
    blanks = _BLANKS.match(text, start)
    return blanks.end() if blanks else start

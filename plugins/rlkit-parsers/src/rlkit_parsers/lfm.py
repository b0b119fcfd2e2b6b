"""The parser of LFM2."""

from __future__ import annotations

import re

from rlkit.interfaces.parser import ParsedTurn, ToolCall, ToolParser
from rlkit.parsers.text import Reading, balanced, decode, failed, find_edge, plain, read_json, scan, to_call
from rlkit_parsers.literals import read_literal

_OPENING = re.compile(r"<\|tool_call_start\|>\s*")
_EDGE = re.compile(r"\s*<\|tool_call_end\|>|(?=<\|tool_call_start\|>)")
_JSON = re.compile(r"\[\s*\{")
_FIRST = re.compile(r"\[\s*([A-Za-z_][\w.-]*)")
_NAME = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*\(\s*")
_KEY = re.compile(r"([A-Za-z_][\w-]*)\s*=\s*")
_MARK = re.compile(r"\s*([],)])\s*")
_END_OF_SCALAR = re.compile(r"[][(){},<]")
_START = re.compile(r"<\|tool_call_start\|>\s*\[\s*[\w.-]+\s*\(")
_AFTER = r"\s*(?:,\s*[A-Za-z_][\w-]*\s*=|\)\s*(?:,\s*[A-Za-z_][\w.-]*\(|\]\s*(?:<\|tool_call_end\|>|\Z)))"
_STRINGS = [
    *(re.compile(rf"{q}([^{q}\\\n]*(?:\\.[^{q}\\\n]*)*){q}(?=\s*[,)])") for q in "'\""),
    # templates of LFM2.5 escape neither quotes nor line breaks
    *(re.compile(rf"{q}((?:(?!<\|tool_call_start\|>).)*?){q}(?={_AFTER})", re.DOTALL) for q in "'\""),
]
_EXPECTED = '[NAME(KEY=VALUE, ...), ...] with values such as "text", 1.5, True, None, [1, 2] and {"a": 1}'


class LfmParser(ToolParser):
    """Reads `<|tool_call_start|>[f(a=1, b='x'), g()]<|tool_call_end|>`, as LFM2 writes it.

    The calls are written as Python's, but any word may name an argument. They may be a list of objects of JSON instead,
    which the vendor's models write if the prompt asks for it.
    """

    @classmethod
    def detects(cls, template: str) -> bool:
        return "<|tool_call_start|>" in template or "<|tool_list_start|>" in template

    def parse(self, text: str) -> ParsedTurn:
        return scan(text, _OPENING, _read)


def _read(text: str, opening: re.Match[str]) -> Reading:
    start = opening.end()
    if _JSON.match(text, start):
        value, end = read_json(text, start, _EDGE)
        return [to_call(call, "arguments") for call in (value if isinstance(value, list) else [value])], end
    try:
        calls, end = _calls(text, start)
        closing = _EDGE.match(text, end)
        if closing is not None or end == len(text):
            return calls, closing.end() if closing else end
        why = "more follows the list"
    except ValueError as error:
        why = str(error)
    stop, end = find_edge(text, start, _EDGE)
    first = _FIRST.match(text, start)
    return [failed(first[1] if first else "", text[start:stop], why, _EXPECTED)], end


def _calls(text: str, start: int) -> tuple[list[ToolCall], int]:
    """Return the calls of a list, and the position after it.

    Raises:
        ValueError: It is malformed.
    """
    if not text.startswith("[", start):
        raise ValueError("it is not a list")
    calls: list[ToolCall] = []
    position, mark = start + 1, ","
    while mark == ",":
        name = _NAME.match(text, position)
        if name is None:
            raise ValueError("one of the list is no call of a name")
        arguments, position = _arguments(text, name.end())
        calls.append(ToolCall(name[1], arguments))
        mark, position = _mark(text, position, ",]")
    return calls, position


def _arguments(text: str, position: int) -> tuple[dict[str, object], int]:
    arguments: dict[str, object] = {}
    while not text.startswith(")", position):
        key = _KEY.match(text, position)
        if key is None:
            raise ValueError("an argument has no name")
        if key[1] in arguments:
            raise ValueError(f"two arguments have the name {key[1]}")
        arguments[key[1]], position = _value(text, key.end(), key[1])
        mark, position = _mark(text, position, ",)")
        if mark == ")":
            return arguments, position
    return arguments, position + 1


def _mark(text: str, position: int, expected: str) -> tuple[str, int]:
    mark = _MARK.match(text, position)
    if mark is None or mark[1] not in expected:
        raise ValueError(f"after {text[max(0, position - 20) : position]!r} there is none of {' '.join(expected)}")
    return mark[1], mark.end()


def _value(text: str, start: int, key: str) -> tuple[object, int]:
    for pattern in _STRINGS:
        string = pattern.match(text, start)
        if string is not None:
            try:
                return read_literal(string.group()), string.end()
            except ValueError:
                return plain(string[1]), string.end()
    if text.startswith(("[", "{"), start):
        try:
            return decode(text, start)
        except ValueError:
            end = balanced(text, start, "\"'", find_edge(text, start, _START)[0])
    else:
        end = find_edge(text, start, _END_OF_SCALAR)[0]
    try:
        return read_literal(text[start:end]), end
    except ValueError:
        raise ValueError(f"the value of {key} is not a literal that JSON can represent") from None

"""The parser of Qwen3-Coder."""

from __future__ import annotations

import re

from rlkit.interfaces.parser import ParsedTurn, ToolCall, ToolParser
from rlkit.parsers.text import Reading, decode, failed, find_edge, scan

_OPENING = re.compile(r"(?:<tool_call>\s*)?<function=(?P<name>[^<>\n]*)>|<tool_call>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>")
_END_OF_VALUE = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=|</function>|</?tool_call>|\Z))")
_CLOSING = re.compile(r"\s*</function>(?:\s*</tool_call>)?")
_EDGE = re.compile(r"</tool_call>|(?=<tool_call>)")
_EXPECTED = "<function=NAME>, then <parameter=KEY>VALUE</parameter> for each argument, then </function>"


class QwenCoderParser(ToolParser):
    """Reads `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`.

    A value that is JSON is decoded and any other is a string, less one line break at each end: `1` is a number, `"1"`
    and `one` are strings. `<tool_call>` itself may be missing, as the models often forget it.
    """

    @classmethod
    def detects(cls, template: str) -> bool:
        return "<function=" in template and "<parameter=" in template

    def parse(self, text: str) -> ParsedTurn:
        return scan(text, _OPENING, _read)


def _read(text: str, opening: re.Match[str]) -> Reading:
    name = (opening["name"] or "").strip()
    arguments: dict[str, object] = {}
    position = opening.end()
    parameter = _PARAMETER.match(text, position)
    while parameter is not None:
        value = _value(text, parameter.end())
        if value is None:
            break
        arguments[parameter[1].strip()], position = value
        parameter = _PARAMETER.match(text, position)
    closing = _CLOSING.match(text, position)
    if name and closing is not None:
        return [ToolCall(name, arguments)], closing.end()
    stop, end = find_edge(text, position, _EDGE)
    excerpt = text[opening.start() : stop].removeprefix("<tool_call>").strip()
    why = "it is not closed, or holds something besides complete parameters" if name else "the name is missing"
    return [failed(name, excerpt, why, _EXPECTED)], end


def _value(text: str, start: int) -> tuple[object, int] | None:
    """Return a parameter's value and the end of its end tag; None without one before the next parameter."""
    tag = "</parameter>"
    try:
        value, end = decode(text, start)
        if text.startswith(tag, end):
            return value, end + len(tag)
    except ValueError:
        pass
    closing = _END_OF_VALUE.search(text, start)
    if closing is None or "<parameter=" in text[start : closing.start()]:
        return None
    return text[start : closing.start()].removeprefix("\n"), closing.end()

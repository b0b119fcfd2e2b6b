"""The parser of Mistral's calls."""

from __future__ import annotations

import re

from rlkit.interfaces.parser import ParsedTurn, ToolParser
from rlkit.parsers.text import Reading, read_json, scan, to_call
from rlkit_parsers.calls import named_call

_OPENING = re.compile(r"\[TOOL_CALLS\]\s*")
_HEAD = re.compile(r"([^][{}\n]*)(?:\[CALL_ID\][^][{}\n]*)?\[ARGS\]")
_EDGE = re.compile(r"(?=\[TOOL_CALLS\])")


class MistralParser(ToolParser):
    """Reads `[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]` and, of newer models, `[TOOL_CALLS]f[ARGS]{"a": 1}`.

    Several calls are several objects of the list or, of newer models, several `[TOOL_CALLS]`. They end the turn: text
    after a call is an error.
    """

    @classmethod
    def detects(cls, template: str) -> bool:
        return "[TOOL_CALLS]" in template

    def parse(self, text: str) -> ParsedTurn:
        return scan(text, _OPENING, _read)


def _read(text: str, opening: re.Match[str]) -> Reading:
    head = _HEAD.match(text, opening.end())
    if head is not None:
        value, end = read_json(text, head.end(), _EDGE)
        return [named_call(head[1].strip(), value)], end
    value, end = read_json(text, opening.end(), _EDGE)
    calls = value if isinstance(value, list) and value else [value]
    return [to_call(call, "arguments") for call in calls], end

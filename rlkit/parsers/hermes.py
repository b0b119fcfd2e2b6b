"""The parser of Hermes and Qwen."""

from __future__ import annotations

import re

from rlkit.interfaces.parser import ParsedTurn, ToolParser
from rlkit.parsers.text import TOOL_CALL_EDGE, Reading, read_json, scan, to_call

_OPENING = re.compile(r"<tool_call>")
_ARGUMENTS = re.compile(r'"arguments\\?"')  # a backslash where the template's own string is in double quotes


class HermesParser(ToolParser):
    """Reads `<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>`, as Hermes, Qwen 2.5 and Qwen 3 write it."""

    generality = 1

    @classmethod
    def detects(cls, template: str) -> bool:
        return "<tool_call>" in template and _ARGUMENTS.search(template) is not None

    def parse(self, text: str) -> ParsedTurn:
        return scan(text, _OPENING, _read)


def _read(text: str, opening: re.Match[str]) -> Reading:
    value, end = read_json(text, opening.end(), TOOL_CALL_EDGE)
    return [to_call(value, "arguments")], end

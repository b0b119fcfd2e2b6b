"""The parser of calls in fenced blocks of JSON."""

from __future__ import annotations

import re

from rlkit.interfaces.parser import ParsedTurn, ToolParser
from rlkit.parsers.text import Malformed, Reading, read_json, scan, to_call

_OPENING = re.compile(r"```json\b")
_EDGE = re.compile(r"```")


class JsonBlockParser(ToolParser):
    """Reads fenced blocks of JSON that hold `{"name": "f", "arguments": {"a": 1}}`; a block without arguments is text.

    For models whose template has no tool calls and whose prompt prescribes this form; set it in the recipe.
    """

    @classmethod
    def detects(cls, template: str) -> bool:  # noqa: ARG003 - whatever the template is
        return False

    def parse(self, text: str) -> ParsedTurn:
        return scan(text, _OPENING, _read)


def _read(text: str, opening: re.Match[str]) -> Reading:
    value, end = read_json(text, opening.end(), _EDGE)
    if isinstance(value, Malformed):
        is_call = '"arguments"' in value.text
    else:
        is_call = isinstance(value, dict) and "arguments" in value
    return [to_call(value, "arguments")] if is_call else [], end

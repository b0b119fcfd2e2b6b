"""The parser of GLM-4.5 and later."""

from __future__ import annotations

import re
from dataclasses import replace

from rlkit.interfaces.parser import ParsedTurn, ToolParser
from rlkit.parsers.text import Reading, Tags, failed, find_edge, read_tagged, scan

_OPENING = re.compile(r"<tool_call>\s*(?P<name>[^<>\n]*)")
_ARGUMENTS = Tags(
    key=re.compile(r"\s*<arg_key>([^<>]+)</arg_key>\s*<arg_value>"),
    end=re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</?tool_call>|\Z))|(?P<other><arg_key>)"),
)
_CLOSING = re.compile(r"\s*</tool_call>")
_EDGE = re.compile(r"</tool_call>|(?=<tool_call>)")
_EXPECTED = "a name, then <arg_key>KEY</arg_key> and <arg_value>VALUE</arg_value> for each argument, then </tool_call>"


class GlmParser(ToolParser):
    """Reads `<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`, as GLM-4.5 and later write it.

    Where the tool's schema does not say what a value is, one that is JSON is decoded and any other is a string, with
    all its blanks: `1` is a number, `"1"` and `one` are strings.
    """

    @classmethod
    def detects(cls, template: str) -> bool:
        return "<arg_key>" in template

    def parse(self, text: str) -> ParsedTurn:
        return scan(text, _OPENING, _read)


def _read(text: str, opening: re.Match[str]) -> Reading:
    name = opening["name"].strip()
    call, position = read_tagged(text, opening.end(), _ARGUMENTS)
    closing = _CLOSING.match(text, position)
    if name and closing is not None:
        return [replace(call, name=name)], closing.end()
    stop, end = find_edge(text, position, _EDGE)
    excerpt = text[opening.start() : stop].removeprefix("<tool_call>").strip()
    why = "it is not closed, or holds something besides complete arguments" if name else "the name is missing"
    return [failed(name, excerpt, why, _EXPECTED)], end

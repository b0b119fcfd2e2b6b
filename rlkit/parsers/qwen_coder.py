"""The parser of Qwen3-Coder."""

from __future__ import annotations

import re
from dataclasses import replace

from rlkit.interfaces.parser import ParsedTurn, ToolParser
from rlkit.parsers.text import Reading, Tags, failed, find_edge, read_tagged, scan

_OPENING = re.compile(r"(?:<tool_call>\s*)?<function=(?P<name>[^<>\n]*)>|<tool_call>")
_ARGUMENTS = Tags(
    key=re.compile(r"\s*<parameter=([^<>\n]+)>"),
    end=re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>|</?tool_call>|\Z))|(?P<other><parameter=)"),
    margin="\n",
)
_CLOSING = re.compile(r"\s*</function>(?:\s*</tool_call>)?")
_EDGE = re.compile(r"</tool_call>|(?=<tool_call>)")
_EXPECTED = "<function=NAME>, then <parameter=KEY>VALUE</parameter> for each argument, then </function>"


class QwenCoderParser(ToolParser):
    """Reads `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`.

    A value has one line break at each end besides. Where the tool's schema does not say what it is, a value that is
    JSON is decoded and any other is a string: `1` is a number, `"1"` and `one` are strings. `<tool_call>` itself may be
    missing, as the models often forget it.
    """

    @classmethod
    def detects(cls, template: str) -> bool:
        return "<function=" in template and "<parameter=" in template

    def parse(self, text: str) -> ParsedTurn:
        return scan(text, _OPENING, _read)


def _read(text: str, opening: re.Match[str]) -> Reading:
    name = (opening["name"] or "").strip()
    call, position = read_tagged(text, opening.end(), _ARGUMENTS)
    closing = _CLOSING.match(text, position)
    if name and closing is not None:
        return [replace(call, name=name)], closing.end()
    stop, end = find_edge(text, position, _EDGE)
    excerpt = text[opening.start() : stop].removeprefix("<tool_call>").strip()
    why = "it is not closed, or holds something besides complete parameters" if name else "the name is missing"
    return [failed(name, excerpt, why, _EXPECTED)], end

"""The parser of Qwen3-Coder."""

from __future__ import annotations

import re
from functools import partial

from rlkit.interfaces.parser import ParsedTurn, ToolParser
from rlkit.parsers.text import scan
from rlkit_parsers.calls import Tags, read_tagged

_OPENING = re.compile(r"(?:<tool_call>\s*)?<function=(?P<name>[^<>\n]*)>|<tool_call>")
_TAGS = Tags(
    key=re.compile(r"\s*<parameter=([^<>\n]+)>"),
    end=re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>|</?tool_call>|\Z))|(?P<other><parameter=)"),
    closing=re.compile(r"\s*</function>(?:\s*</tool_call>)?"),
    arguments="parameters",
    expected="<function=NAME>, then <parameter=KEY>VALUE</parameter> for each argument, then </function>",
    margin="\n",
)


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
        return scan(text, _OPENING, partial(read_tagged, tags=_TAGS))

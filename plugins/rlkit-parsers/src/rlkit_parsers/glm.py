"""The parser of GLM-4.5 and later."""

from __future__ import annotations

import re
from functools import partial

from rlkit.interfaces.parser import ParsedTurn, ToolParser
from rlkit.parsers.text import scan
from rlkit_parsers.calls import Tags, read_tagged

_OPENING = re.compile(r"<tool_call>\s*(?P<name>[^<>\n]*)")
_TAGS = Tags(
    key=re.compile(r"\s*<arg_key>([^<>]+)</arg_key>\s*<arg_value>"),
    end=re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</?tool_call>|\Z))|(?P<other><arg_key>)"),
    closing=re.compile(r"\s*</tool_call>"),
    arguments="arguments",
    expected="a name, then <arg_key>KEY</arg_key> and <arg_value>VALUE</arg_value> for each argument, "
    "then </tool_call>",
)


class GlmParser(ToolParser):
    """Reads `<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`, as GLM-4.5 and later write it.

    Where the tool's schema does not say what a value is, one that is JSON is decoded and any other is a string, with
    all its blanks: `1` is a number, `"1"` and `one` are strings.
    """

    @classmethod
    def detects(cls, template: str) -> bool:
        return "<arg_key>" in template

    def parse(self, text: str) -> ParsedTurn:
        return scan(text, _OPENING, partial(read_tagged, tags=_TAGS))

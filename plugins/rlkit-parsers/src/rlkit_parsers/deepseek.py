"""The parser of DeepSeek's calls."""

from __future__ import annotations

import re

from rlkit.interfaces.parser import ParsedTurn, ToolParser
from rlkit.parsers.text import Reading, read_json, scan
from rlkit_parsers.calls import named_call


def _token(words: str) -> str:
    """Return a control token, whose bars are U+FF5C and blanks U+2581."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_CALLS, _CALLS_END = _token("tool calls begin"), _token("tool calls end")
_CALL, _CALL_END = _token("tool call begin"), _token("tool call end")
_SEP = _token("tool sep")
_OPENING = re.compile(rf"{_CALLS}(?:\s*{_CALL})?|{_CALL}")
_HEAD = re.compile(rf"[^\n<]*{_SEP}(?P<older>[^\n<{{]*)\n\s*```(?:json)?|(?P<newer>[^\n<]*){_SEP}")
_EDGE = re.compile(rf"(?:```\s*)?(?:{_CALL_END}(?:\s*{_CALLS_END})?|{_CALLS_END}|(?={_CALLS}|{_CALL}))|```\s*\Z")


class DeepSeekParser(ToolParser):
    """Reads DeepSeek's calls, which are enclosed by control tokens and split by another, here called SEP.

    V3 and R1 write `function SEP f` and, on the next line, the arguments in a fenced block of JSON; V3.1 and later
    write `f SEP {"a": 1}`.
    """

    @classmethod
    def detects(cls, template: str) -> bool:
        return _CALL in template

    def parse(self, text: str) -> ParsedTurn:
        return scan(text, _OPENING, _read)


def _read(text: str, opening: re.Match[str]) -> Reading:
    head = _HEAD.match(text, opening.end())
    name = (head["older"] or head["newer"] or "").strip() if head else ""
    value, end = read_json(text, head.end() if head else opening.end(), _EDGE)
    return [named_call(name, value)], end

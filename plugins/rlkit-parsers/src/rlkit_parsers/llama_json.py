"""The parser of Llama 3's JSON calls."""

from __future__ import annotations

import re

from rlkit.interfaces.parser import ParsedTurn, ToolParser
from rlkit.parsers.text import Malformed, NotJsonError, Reading, balanced, decode, scan, to_call

_OPENING = re.compile(r"(?P<tag><\|python_tag\|>\s*)|\{(?=\s*[\"'nt])")
_LIKE_A_CALL = re.compile(r"""\{\s*["']?(?:name|type)["']?\s*:[^{}]*["'](?:parameters|arguments)["']\s*:""")
_SEPARATOR = re.compile(r"[\s;]*")
_HEADER = re.compile(r"<\|(?:start_header_id|header_start)\|>")
_PARAMETERS = re.compile(r'"parameters\\?"\s*:')  # a backslash where the template's own string is in double quotes


class LlamaJsonParser(ToolParser):
    """Reads `{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}`, as Llama 3.1 and later write it.

    `<|python_tag|>` may precede a call. Without it an object is a call if it has `parameters`, or `arguments`
    instead, which these models write too; any other object is text.
    """

    generality = 3

    @classmethod
    def detects(cls, template: str) -> bool:
        return _HEADER.search(template) is not None and _PARAMETERS.search(template) is not None

    def parse(self, text: str) -> ParsedTurn:
        return scan(text, _OPENING, _read)


def _read(text: str, opening: re.Match[str]) -> Reading:
    tagged = opening["tag"] is not None
    start = opening.end() if tagged else opening.start()
    key = None
    try:
        value, end = decode(text, start)
        if isinstance(value, dict):
            key = next((key for key in ("parameters", "arguments") if key in value), None)
        if not tagged and key is None:
            return [], end
    except NotJsonError as error:
        if not tagged and not _LIKE_A_CALL.match(text, start):
            return [], max(error.end, opening.end())
        end = balanced(text, start) if text.startswith("{", start) else len(text)
        value = Malformed(text[start:end].strip(), str(error))
    separator = _SEPARATOR.match(text, end)
    return [to_call(value, key or "parameters")], separator.end() if separator else end

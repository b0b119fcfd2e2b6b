"""The parser of Gemma 4."""

from __future__ import annotations

import json
import re

from rlkit.interfaces.parser import ParsedTurn, ToolParser
from rlkit.parsers.text import BRACKETS, Malformed, Reading, decode, find_edge, scan
from rlkit_parsers.calls import named_call

_OPENING = re.compile(r"<\|tool_call>\s*(?:call:)?(?P<name>[^{}<\n]*)")
_EDGE = re.compile(r"\s*<tool_call\|>|(?=<\|tool_call>)")
_PIECE = re.compile(
    r"""<\|"\|>(?P<string>.*?)(?:<\|"\|>|\Z)|"[^"\\]*(?:\\.[^"\\]*)*"?|(?P<word>[^\s{}\[\],:"<][^{}\[\],:"<]*)|.""",
    re.DOTALL,
)
_NAMES = {"None": "null", "True": "true", "False": "false"}


class GemmaParser(ToolParser):
    """Reads `<|tool_call>call:f{a:1,b:<|"|>x<|"|>}<tool_call|>`, as Gemma 4 writes it.

    Arguments are an object of JSON whose keys have no quotes and whose strings are between `<|"|>`. The template writes
    Python's `None` for null.
    """

    @classmethod
    def detects(cls, template: str) -> bool:
        return "<|tool_call>" in template and "<tool_call|>" in template

    def parse(self, text: str) -> ParsedTurn:
        return scan(text, _OPENING, _read)


def _read(text: str, opening: re.Match[str]) -> Reading:
    source, end = _as_json(text, opening.end())
    try:
        value, rest = decode(source, 0)
        closing = _EDGE.match(text, end)
        if rest == len(source) and (closing or not text[end:].strip()):
            return [named_call(opening["name"].strip(), value)], closing.end() if closing else len(text)
        why = "more follows the arguments"
    except ValueError as error:
        why = str(error)
    stop, end = find_edge(text, opening.end(), _EDGE)
    return [named_call(opening["name"].strip(), Malformed(text[opening.end() : stop].strip(), why))], end


def _as_json(text: str, start: int) -> tuple[str, int]:
    """Return the text from `start` to its closing bracket as JSON, and the index of its end."""
    pieces: list[str] = []
    depth, end = 0, start
    for piece in _PIECE.finditer(text, start):
        string, word, end = piece["string"], piece["word"], piece.end()
        depth += BRACKETS.get(piece.group(), 0)
        if string is not None or (word is not None and text.startswith(":", end)):
            pieces.append(json.dumps(string if word is None else word.strip()))
        else:
            pieces.append(piece.group() if word is None else _NAMES.get(word.strip(), word))
        if depth <= 0 or piece.group() == "<":  # which no value holds outside a string
            break
    return "".join(pieces), end

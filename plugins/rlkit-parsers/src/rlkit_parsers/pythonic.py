"""The parser of calls that are written as a Python list."""

from __future__ import annotations

import ast
import re
import warnings

from rlkit.interfaces.parser import ParsedTurn, ToolCall, ToolParser
from rlkit.parsers.text import Reading, balanced, failed, scan
from rlkit_parsers.literals import literal

_CALL = r"\[\s*([A-Za-z_][\w.]*)\s*\("
_OPENING = re.compile(
    # A turn may start with any call; within prose, a list is read as calls if its first has keywords or no arguments.
    rf"(?:\A\s*|<\|python_(?:start|tag)\|>\s*)(?={_CALL})|(?={_CALL}\s*(?:\)|[A-Za-z_]\w*\s*=(?!=)))"
)
_CLOSING = re.compile(r"\s*<\|python_end\|>")
_ASKED_FOR = re.compile(r"\[\w+\(\w+=\w+")
_EXPECTED = '[NAME(KEY=VALUE, ...), ...] with values such as "text", 1.5, True, None, [1, 2] and {"a": 1}'


class PythonicParser(ToolParser):
    """Reads `[f(a=1, b="x"), g()]`, as Llama 3.2 and Llama 4 write it.

    The list is read as Python's syntax and never evaluated: arguments have names and literal values that JSON can
    hold (`true`, `false` and `null` are understood), so Python's keywords cannot name an argument.
    """

    generality = 2

    @classmethod
    def detects(cls, template: str) -> bool:
        return _ASKED_FOR.search(template) is not None

    def parse(self, text: str) -> ParsedTurn:
        return scan(text, _OPENING, _read)


def _read(text: str, opening: re.Match[str]) -> Reading:
    end = balanced(text, opening.end(), quotes="\"'")
    calls = _calls(text[opening.end() : end], opening[1] or opening[2])
    closing = _CLOSING.match(text, end)
    return calls, closing.end() if closing else end


def _calls(source: str, first: str) -> list[ToolCall]:
    """Read a list of calls; return one with an error, under the name of the first, if it is malformed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes in strings
            tree = ast.parse(source, mode="eval").body
        if isinstance(tree, ast.List):
            return [_call(node, source) for node in tree.elts]
        why = "it is not a list"
    except SyntaxError as error:
        why = error.msg
    except (ValueError, MemoryError, RecursionError):
        why = "it cannot be read as Python"
    return [failed(first, source, why, _EXPECTED)]


def _call(node: ast.expr, source: str) -> ToolCall:
    name = _name(node.func) if isinstance(node, ast.Call) else None
    if not isinstance(node, ast.Call) or name is None:
        return failed("", source, "one of the list is no call of a name", _EXPECTED)
    values = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
    if len(values) < len(node.args) + len(node.keywords):
        return failed(name, source, "an argument has no name, or two have the same", _EXPECTED)
    arguments: dict[str, object] = {}
    for key, value in values.items():
        try:
            arguments[key] = literal(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return failed(name, source, f"the value of {key} is not a literal that JSON can represent", _EXPECTED)
    return ToolCall(name, arguments)


def _name(node: ast.expr) -> str | None:
    """Return a name, dotted or not; None for anything else that can be called."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None

"""Forms of calls that several families of models share: arguments between tags, and a name before a JSON object."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import NamedTuple

from rlkit.interfaces.parser import ToolCall
from rlkit.parsers.text import TOOL_CALL_EDGE, Malformed, Reading, decode, failed, find_edge


class Tags(NamedTuple):
    """How a form writes arguments between tags.

    Args:
        key: Matches what precedes a value; the first group is the argument's name.
        end: Matches the end of a value or, as the group `other`, what shows that the value has no end.
        closing: Matches the end of a call.
        arguments: What the form calls its arguments.
        expected: The form of a call, for messages.
        margin: What may stand at both ends of a value and does not belong to it.
    """

    key: re.Pattern[str]
    end: re.Pattern[str]
    closing: re.Pattern[str]
    arguments: str
    expected: str
    margin: str = ""


def read_tagged(text: str, opening: re.Match[str], tags: Tags) -> Reading:
    """Return the call after an opening in `<tool_call>`, whose group `name` is its name, and where it ends."""
    name = (opening["name"] or "").strip()
    call, position = _tagged_arguments(text, opening.end(), tags)
    closing = tags.closing.match(text, position)
    if name and closing is not None:
        return [replace(call, name=name)], closing.end()
    stop, end = find_edge(text, position, TOOL_CALL_EDGE)
    excerpt = text[opening.start() : stop].removeprefix("<tool_call>").strip()
    incomplete = f"it is not closed, or holds something besides complete {tags.arguments}"
    return [failed(name, excerpt, incomplete if name else "the name is missing", tags.expected)], end


def _tagged_arguments(text: str, start: int, tags: Tags) -> tuple[ToolCall, int]:
    """Return a call without a name that has the complete arguments from `start` on, and the position after them.

    A value that is JSON is decoded, and any other is a string. Where a name comes again, or a value has no end, the
    arguments end.
    """
    call = ToolCall("")
    position = start
    key = tags.key.match(text, position)
    while key is not None and key[1].strip() not in call.arguments:
        try:
            value, ends = decode(text, key.end())
            end = tags.end.match(text, ends)
        except ValueError:
            value, end = None, None
        decoded = end is not None and end.lastgroup != "other"
        end = end if decoded else tags.end.search(text, key.end())
        if end is None or end.lastgroup == "other":
            break
        written = text[key.end() : end.start()].removeprefix(tags.margin).removesuffix(tags.margin)
        call.arguments[key[1].strip()] = value if decoded else written
        call.texts[key[1].strip()] = written
        position = end.end()
        key = tags.key.match(text, position)
    return call, position


def named_call(name: str, value: object) -> ToolCall:
    """Return a call from a name and what should be the JSON object of its arguments."""
    if name and isinstance(value, dict):
        return ToolCall(name, value)
    if not isinstance(value, Malformed):
        value = Malformed(json.dumps(value, ensure_ascii=False), "the arguments are no object")
    why = value.why if name else "the name is missing"
    return failed(name, value.text, why, "a name, then its arguments as a JSON object")

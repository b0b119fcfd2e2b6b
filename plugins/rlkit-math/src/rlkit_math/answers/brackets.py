"""Texts split at separators that are outside brackets."""

from __future__ import annotations

import re
from collections.abc import Iterator

OPENING, CLOSING = "([{", ")]}"


def depth_of(text: str) -> int:
    """Return the maximum depth of brackets in a text."""
    depth = deepest = 0
    for character in text:
        depth += (character in OPENING) - (character in CLOSING)
        deepest = max(deepest, depth)
    return deepest


def closing(text: str) -> int:
    """Return the position at which the first bracket is closed, by any closing bracket."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character in OPENING) - (character in CLOSING)
        if depth == 0:
            return position
    return -1


def separators(text: str, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
    """Yield the separators of a text that are outside brackets."""
    depth = last = 0
    for match in pattern.finditer(text):
        between = text[last : match.start()]
        depth += sum(map(between.count, OPENING)) - sum(map(between.count, CLOSING))
        last = match.start()
        if depth == 0:
            yield match


def split(text: str, pattern: re.Pattern[str]) -> Iterator[str]:
    """Yield the parts of a text between the separators that are outside brackets."""
    start = 0
    for match in separators(text, pattern):
        yield text[start : match.start()].strip()
        start = match.end()
    yield text[start:].strip()

"""Conditions after an answer: the domain of its integers, what its letters stand for, where it is defined."""

from __future__ import annotations

import re
from typing import NamedTuple

_KIND = (
    r"(?P<kind>(?:positive |non-?negative |natural |whole |real )*(?:integers?|numbers?|constants?|reals?)"
    r"(?: of integration)?)(?![A-Za-z])"
)
_LETTERS = "(?P<letters>[A-Za-z](?: ?(?:,|and) ?[A-Za-z])*)"
_EVERY = r"(?:(?:all|any|every|each|some|arbitrary|an?|the|\\forall) ?)*"
_LINK = re.compile(
    r"(?<=[\w)}\]!'])(?:(?: ?(?:[,;:|(]|\\mid(?![a-z])|\\forall(?![a-z])|\b(?:where|with|for|if|when|and|as)\b)){1,4} ?"
    r"| (?=[a-z] ?\\in ?[ZN]))(?=[A-Za-z\\])"
)
"""What joins a condition to an answer: a comma, a bar, a bracket, `for all`."""
_CONDITIONS = (
    re.compile(rf"{_EVERY}(?:real |integers? |numbers? )*{_LETTERS} ?\\in ?(?P<set>\\R|[ZNQC])"),
    re.compile(rf"{_LETTERS} (?:is|are|being) (?:(?:any|arbitrary|an?|some|the) )*(?:[a-z]+ (?=constant))?{_KIND}"),
    re.compile(rf"{_EVERY}{_KIND} {_LETTERS}"),
    re.compile(rf"(?:all|any|every|each) (?:real )?{_LETTERS}"),
    re.compile(
        rf"{_EVERY}(?:integers? )?(?=[a-z] ?(?:\\ne|!=)|[kmn] ?(?:\\ge|>))(?P<letters>[a-z])"
        r" ?(?P<restriction>(?:\\[gn]e|[>!]=|>) ?-?[0-9]+)"
    ),
)


class Condition(NamedTuple):
    """The letters that a condition is about, and their domain: `Z`, `N`, `\\ne1`; empty if it says nothing."""

    letters: str
    domain: str


def split_condition(text: str) -> tuple[str, Condition | None]:
    """Return an answer without the last condition after it, and this condition; None if there is none."""
    for link in _LINK.finditer(text):
        rest = text[link.end() :].strip(" ().")
        for pattern in _CONDITIONS:
            match = pattern.fullmatch(rest)
            if match is not None:
                return text[: link.start()], Condition(match["letters"], _domain(match.groupdict()))
    return text, None


def _domain(parts: dict[str, str | None]) -> str:
    restriction, kind = parts.get("restriction"), parts.get("kind") or parts.get("set") or ""
    if restriction:
        return restriction.replace(" ", "")
    if kind in ("Z", "N"):
        return kind
    is_integer = "integer" in kind or "natural" in kind or "whole" in kind
    return "" if not is_integer else "Z" if kind.startswith("integer") else "N"

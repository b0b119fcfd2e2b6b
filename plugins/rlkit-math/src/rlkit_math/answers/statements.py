"""Values that a sentence states: `the area is $25\\pi$`, `12 is the area`, `so n = 25`."""

# ruff: noqa: RUF001 (answers contain these characters)

from __future__ import annotations

import re
from typing import NamedTuple

from rlkit_math.answers.compare import same
from rlkit_math.answers.forms import is_marked, parse_or_none
from rlkit_math.answers.prose import is_doubtful
from rlkit_math.answers.values import Number, UnorderedItems, Words

END_OF_SENTENCE = re.compile(r"[.!?]\s+")
_TOKEN = re.compile(r"\S+")
_VALUE = re.compile(
    r"(?![0-9.]+(?:: | k\b| and [0-9]+/)|.* for )(?!(?!sin|cos|tan|log|ln)[a-z]{2,} )(?=.*[0-9π√∞\\])"
    r"(?:[^$]*(?:\$[^$]*\$[^$]*)*|\$[0-9][^$]*)$"
)
"""What may be a value, by its characters: it does not begin with a word or within dollar signs."""
MAX_TOKENS = 16
"""Maximum number of beginnings that are tried for a value at the end of a sentence."""
_INLINE = r"(?:\$[^$]+\$|\\\((?:(?!\\\)).)+\\\))"
_INTRODUCTIONS = (
    re.compile(
        r".*(?:\b(?:is|are|equals?|ist|sind|beträgt|lauten|est|sont|vaut|es|son|é|são|sono|равны"
        r"|равна|равно|равен|составляет)\b|[为是]):? ?(?=\S)"
    ),
    re.compile(r".*(?:,|\band) (?:so|thus|hence|therefore)(?: we (?:get|have|find|obtain))?,? (?=\S)"),
    re.compile(rf".*?(?={_INLINE}(?:(?:,? (?:or|and) |, ){_INLINE})*[^$]*$)"),
)
"""What is before the last value of a sentence: `the area is`, or all before the last formulae, joined by words."""
_SUBJECT = re.compile(
    r"(?:(?:so|thus|hence|therefore),? )?(\S.{0,80}?) (?:is|are) (?:the|our|your|his|her|their)"
    r"(?: (?!bound|limit)[a-z$]+){1,9}\.?",
    re.I,
)
"""A value that a sentence is about: `12 is the area`."""
_COUNTED = re.compile(
    r"(?:[A-Za-z ]{2,16}, )?there (?:are|were|exist) (?:exactly |a total of |in total )?([0-9]+)"
    r"(?: (?!more|less|fewer)[a-z-]+){1,6}"
    r" (?:(?:less|fewer|greater|more|larger|smaller) than|below|under|between|from|up to|not exceeding) [a-z0-9$ ]+\.?",
    re.I,
)
"""How many there are of what is less than another number."""
_NOT_OTHER = re.compile(r", (?:and )?not \$?[0-9.,]*[0-9](?: [a-z]+)?\.?$")
_REASON = re.compile(r"(?<=\S),? (?:because|since) [^;]+$")
_CIRCUMSTANCE = re.compile(
    r",? (?:attained|achieved|reached|obtained|when|where|since|because|which|as (?=[a-z]{4}))\b.*$"
)
_EQUATED = re.compile(r"(?:^|(?<![-+*/×÷·^])\s)\$?(-?[0-9][0-9.,]*(?:/[0-9]+)?\\?%?)\$?(?: ?=| \() ?\$?$")
"""A bare number that a number after it repeats."""
CONTEXT = 80
"""Number of characters before a number that may equate another with it."""


class Statement(NamedTuple):
    """A value that a line states, and its position in the line."""

    text: str
    start: int
    length: int = 0
    """Number of characters of the statement, if it goes on after its value."""


def stated_in(line: str) -> Statement | None:
    """Return the statement at the end of a line, such as `the area is $25\\pi$`; None if it states no value."""
    subject = _SUBJECT.fullmatch(line)
    if subject is not None and is_marked(subject[1]) and not is_doubtful(line, in_words=True):
        return Statement(subject[1], subject.start(1))
    other = _NOT_OTHER.search(line)
    if other is not None:
        return stated_in(line[: other.start()] + ".")
    counted = _COUNTED.fullmatch(line)
    if counted is not None:
        return Statement(counted[1], counted.start(1), len(line) - counted.start(1))
    reason = _REASON.search(line)
    explained = stated_in(line[: reason.start()] + ".") if reason is not None and not is_doubtful(reason[0]) else None
    if explained is not None:
        return explained
    for introduction in _INTRODUCTIONS:
        match = introduction.match(line)
        value = "" if match is None else _CIRCUMSTANCE.sub("", line[match.end() :]).rstrip("*")
        if value.startswith("not "):
            return None
        if match is not None and is_marked(value):
            return Statement(value, match.end())
    last = END_OF_SENTENCE.split(line)[-1]
    if last != line and not is_doubtful(last) and "=" in last and is_marked(last):
        return Statement(last, len(line) - len(last))
    sentence = len(line) - len(END_OF_SENTENCE.split(line)[-1])
    for token in list(_TOKEN.finditer(line, sentence))[-MAX_TOKENS:]:
        before = line[sentence : token.start()].rstrip()
        is_new = re.match("[0-9]+ ?[A-Za-z]|.*[<>≤≥]", line[token.start() :]) is not None
        if before[-1:].isdigit() or is_doubtful(before, in_words=is_new):
            continue
        value = re.sub(r"(?<!\.)\.$", "", line[token.start() :])
        answer = parse_or_none(value) if _VALUE.match(value) else None
        items = answer.items if isinstance(answer, UnorderedItems) and re.search("[,=]", value) else ()
        is_clause = any(isinstance(item, Number) and item.noun for item in items)
        if not isinstance(answer, Words | None) and not is_clause:
            if is_contradicted(line[: token.start()], value):
                return Statement(line, 0)
            return Statement(value, token.start())
    return None


def is_contradicted(before: str, number: str) -> bool:
    """Whether another value is equated with a number, as in `0.16 = 15%`, which is no calculation."""
    equated = _EQUATED.search(before[-CONTEXT:])
    value, other = (parse_or_none(number), parse_or_none(equated[1])) if equated is not None else (None, None)
    return isinstance(value, Number) and isinstance(other, Number) and not same(value, other)

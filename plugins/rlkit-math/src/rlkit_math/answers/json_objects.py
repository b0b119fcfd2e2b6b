"""The answer of a JSON object at the end of a text."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from rlkit_math.answers.prose import is_doubtful

MAX_OBJECT = 2000
"""Maximum number of characters of an object."""
MAX_STARTS = 8
"""Maximum number of beginnings that are tried for an object."""
_OPENING_FENCE = re.compile(r"`{3}(?:json)?\s*$", re.I)
_START = re.compile(r"\{(?=\s*\")")
_ESCAPE = re.compile(r"\\\\|\\(?=[A-Za-z]{2}|[()\[\],;!{}%$ ])(?!u[0-9A-Fa-f]{4})")
"""Escapes, of which `\\frac` and `\\(` are none."""
_KEY = re.compile(r"(?:the[ _])?(?:final[ _-]?)?(?:answer|result)|final", re.I)
_OTHER_KEY = re.compile(r"answer|result|final|correct|alternative|instead|wrong|option|format|example", re.I)
_REJECTED = re.compile(
    r"(?:wrong|incorrect|false|previous|old|initial|alternative|first)[ _-]?(?:\w+[ _-])?(?:answer|result)", re.I
)
_VERDICT = re.compile(
    r"(?:is|was)?[_ -]?(?:(?:in|not[_ -]?)?correct|right|wrong|(?:in)?valid|verified|true|false)", re.I
)
_WRONG = re.compile(r"in|not|wrong|false", re.I)


class JsonAnswer(NamedTuple):
    """The text of an answer and of what an object says after it."""

    text: str
    following: str


def json_answer(text: str) -> JsonAnswer | None:
    """Return the only answer of the object that ends a text; None if there is none, or its introduction is doubtful."""
    text = text[-2 * MAX_OBJECT :].rstrip().removesuffix("```").rstrip(" \n.")
    if not text.endswith("}"):
        return None
    for start in list(_START.finditer(text, max(0, len(text) - MAX_OBJECT)))[:MAX_STARTS]:
        pairs = _pairs(text[start.start() :])
        if pairs is not None:
            before = _OPENING_FENCE.sub("", text[: start.start()]).strip()
            return None if is_doubtful(before.rpartition("\n")[2], in_words=True) else _only_answer(pairs)
    return None


def _pairs(text: str) -> list[tuple[str, object]] | None:
    escaped = _ESCAPE.sub(r"\\\\", text)
    try:
        parsed = json.loads(escaped, object_pairs_hook=list, parse_int=str, parse_float=str, parse_constant=str)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, list) else None


def _verdicts(pairs: list[tuple[str, object]]) -> list[tuple[str, object]]:
    """Read the judgement of an object on its own answer, with `"false"` and `"true"` as values."""
    values = {"false": False, "no": False, "true": True, "yes": True}
    return [
        (key, values.get(value.lower(), value) if isinstance(value, str) else value)
        for key, value in pairs
        if _VERDICT.fullmatch(key)
    ]


def _only_answer(pairs: list[tuple[str, object]]) -> JsonAnswer | None:
    index = next((index for index, (key, _) in enumerate(pairs) if _KEY.fullmatch(key)), None)
    if any(isinstance(value, bool) and bool(_WRONG.search(key)) == value for key, value in _verdicts(pairs)):
        return JsonAnswer("", "")
    if any(_REJECTED.match(key) for key, _ in pairs):
        return JsonAnswer("", "")
    if index is None or any(_OTHER_KEY.search(key) for key, _ in pairs[:index] + pairs[index + 1 :]):
        return None
    value = pairs[index][1]
    values = value if isinstance(value, list) else [value]
    texts = [text for text in values if isinstance(text, str)]
    if not texts or len(texts) < len(values):
        return None
    unit = next((value for key, value in pairs if key.lower() in ("unit", "units")), "")
    following = ". ".join(value for _, value in pairs[index + 1 :] if isinstance(value, str))
    return JsonAnswer(", ".join(texts) + (f" {unit}" if isinstance(unit, str) and unit else ""), following)

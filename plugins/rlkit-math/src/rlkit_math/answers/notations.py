"""One value in two notations: `1/8, or 12.5%`, `0.5 (that is, 1/2)`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from rlkit_math.answers.compare import agree_in_nouns, same
from rlkit_math.answers.values import Answer, Formula, Named, Notations, Number

_JOINT = r"(?:(?:or|i\.?e\.?|that is|which (?:is|equals)|equivalently|equals|the same as)\b\.?,? ?)"
_TWO = re.compile(
    rf"(?P<first>[^,]+?)(?:,? {_JOINT}+| \((?P<bracket>{_JOINT}{{0,2}}))(?P<second>[^,]+?)(?(bracket)\))"
    r"(?: (?:in|as an?) (?:decimal|fraction)(?: form)?)?"
)


def in_two_notations(text: str, parse_item: Callable[[str], Answer | None]) -> Notations | None:
    """Parse a number or a formula in two notations; None if they are not one value, or the same characters."""
    match = _TWO.fullmatch(text) if "(" in text or " " in text else None
    if match is None or match["first"] == match["second"]:
        return None
    first, second = parse_item(match["first"]), parse_item(match["second"])
    if isinstance(first, Named) and isinstance(second, Named) and second.name == first.name:
        second = second.value
    value = first.value if isinstance(first, Named) else first
    if first is None or not isinstance(value, Number | Formula) or not isinstance(second, Number | Formula):
        return None
    is_one = agree_in_nouns(value, second) and same(_as_fraction(value), _as_fraction(second))
    return Notations((first, second)) if is_one else None


def _as_fraction(answer: Number | Formula) -> Number | Formula:
    """Return 50% as 0.5 alone, for beside `50` it is another value."""
    if isinstance(answer, Number) and answer.unit == "percent":
        return replace(answer, readings=answer.readings[-1:], unit="")
    return answer

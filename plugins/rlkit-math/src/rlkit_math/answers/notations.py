"""One value in several notations: `1/8, or 12.5%`, `3/20 = 0.15 = 15%`; a value beside one that is rejected."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from rlkit_math.answers import evaluate
from rlkit_math.answers.compare import agree_in_nouns, same
from rlkit_math.answers.units import alternatives
from rlkit_math.answers.values import Answer, Formula, Named, Notations, Number

_JOINT = r"(?:(?:or|i\.?e\.?|that is|which (?:is|equals)|equivalently|equals|the same as)\b\.?,? ?)"
_AS_DECIMAL = r"(?: (?:in|as an?) (?:decimal|(?:improper )?fraction|mixed number|percentage|percent)s?(?: form)?)?"
_TWO = re.compile(
    rf"(?P<first>[^,]+?)(?:,? {_JOINT}+| \((?P<bracket>{_JOINT}{{0,2}}))(?P<second>[^,]+?)"
    rf"{_AS_DECIMAL}(?(bracket)\)){_AS_DECIMAL}"
)
_REJECTED = re.compile(
    r"(?P<first>[^()]+?),? \((?:and )?(?:not|rather than|instead of) (?P<second>[^(),]+)"
    r", (?:which|since|because|as) (?P<reason>[^()]+)\)"
)
_CONTRADICTING = re.compile(rf"\b(?:{alternatives('retracting')}|right|correct|better|also)\b|[?≠=]", re.I)


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


def without_rejected(text: str, parse_item: Callable[[str], Answer | None]) -> Answer | None:
    """Parse the number of `36 (not 72, which counts both)`; None for other text, or if it is rejected itself."""
    match = _REJECTED.fullmatch(text) if text.endswith(")") else None
    if match is None or _CONTRADICTING.search(match["reason"]):
        return None
    first, second = parse_item(match["first"]), parse_item(match["second"])
    if not isinstance(first, Number) or not isinstance(second, Number) or same(second, first):
        return None
    return None if same(_as_fraction(second), _as_fraction(first)) else first


def value_of_chain(sides: Sequence[Answer | None]) -> Number | Formula | Notations | None:
    """Return the last number of a chain of equal values such as 40 + 32 = 72, else its end; None for any other.

    With a percentage, all numbers are notations of one value: `3/20 = 0.15 = 15%` is not 15.
    """
    numbers = [side for side in sides if isinstance(side, Number)]
    values = [number_value(_as_fraction(side) if isinstance(side, Number) else side) for side in sides]
    complete = [value for value in values if value is not None]
    is_true = len(complete) == len(sides) and all(evaluate.same_value(value, complete[0]) for value in complete)
    end = sides[-1]
    if not is_true or not (numbers or isinstance(end, Formula)):
        return None
    is_percentage = len(numbers) > 1 and any(number.unit == "percent" for number in numbers)
    if not numbers and isinstance(end, Formula):
        return end
    return Notations(tuple(numbers)) if is_percentage else numbers[-1]


def number_value(answer: Answer | None) -> evaluate.Value | None:
    """Return the value of a number, or of a formula without variables; None if there is none."""
    if isinstance(answer, Number):
        return answer.readings[0]
    try:
        return evaluate.value_of(answer.node) if isinstance(answer, Formula) and not answer.node.variables() else None
    except evaluate.UndefinedError:
        return None

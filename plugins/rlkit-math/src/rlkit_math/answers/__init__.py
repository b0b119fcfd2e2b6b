"""Final answers: extracted from a text, parsed completely in one of several forms, and compared.

References and answers are parsed the same way. A text that is in no form is no answer and equals nothing. What belongs
here: the forms of answers (`forms`), their parts and values, and equality (`compare`). What does not: how a reward
counts it (`rlkit_math.reward`), and the file formats of data sets (`rlkit_tasks`).
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

from rlkit_math.answers import compare
from rlkit_math.answers.extract import FinalAnswer, final_answer, marked_or_all
from rlkit_math.answers.forms import MAX_LENGTH, parse_answer
from rlkit_math.answers.markup import without_markup
from rlkit_math.answers.nodes import UngradableError
from rlkit_math.answers.values import Answer, Named, Notations, Number, Words, form_of

__all__ = [
    "FinalAnswer",
    "UngradableError",
    "canonical",
    "equal",
    "equal_at_once",
    "final_answer",
    "form_of_completion",
    "form_of_reference",
    "reference_of",
]

LARGEST_SHOWN_BITS = 8192
"""Maximum bits of a value that stands in digits."""
SIMPLE = (Number, Words, type(None))
"""Forms that are compared in microseconds; no form, too."""


def equal(actual: str, expected: str) -> bool:
    """Whether two answers are the same number, formula, words or collection of these; 50% is both 50 and 0.5.

    Raises:
        UngradableError: The answer is too large to be compared.
    """
    return _same(parse_answer(actual), parse_answer(expected))


def equal_at_once(actual: str, expected: str) -> bool | None:
    """Return `equal` for numbers and words, in microseconds; None for all other forms."""
    answers = parse_answer(actual), parse_answer(expected)
    return _same(*answers) if all(isinstance(answer, SIMPLE) for answer in answers) else None


def _same(actual: Answer | None, expected: Answer | None) -> bool:
    return actual is not None and expected is not None and compare.same(actual, expected)


@lru_cache(1024)  # the samples of a prompt have one reference
def reference_of(text: str) -> str | None:
    """Return the answer in a reference: the marked part, else all of it.

    None if it is in no form, or too large to be compared.
    """
    answer = marked_or_all(text)
    try:
        return answer if equal(answer, answer) else None
    except UngradableError:
        return None


def form_of_reference(text: str) -> str:
    """Return the name of a reference's form; `in no form` if it cannot be parsed."""
    answer = reference_of(text)
    return form_of(None if answer is None else parse_answer(answer))


def form_of_completion(text: str) -> str:
    """Return the name of the form of a completion's final answer; `in no form` if it cannot be parsed."""
    answer = final_answer(text).text
    try:
        return form_of(None if answer is None else parse_answer(answer))
    except UngradableError:
        return "too large"


def canonical(answer: str) -> str:
    """Return one form for all answers that are the same number, or that differ only in blanks and markup.

    Units and currencies are removed, except the percent sign. A long answer stays as it is.
    """
    if len(answer) > MAX_LENGTH:
        return answer
    try:
        value = parse_answer(answer)
    except UngradableError:
        value = None
    if isinstance(value, Notations):
        value = value.items[0]
    if isinstance(value, Named):
        value = value.value
    if not isinstance(value, Number) or value.readings[0].numerator.bit_length() > LARGEST_SHOWN_BITS:
        return "".join(without_markup(answer).casefold().split())
    return _decimal(value.readings[0]) + "%" * (value.unit == "percent")


def _decimal(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value)
    decimal = repr(float(value)) if abs(value) < 2**53 else ""
    return str(value) if not decimal or Fraction(decimal) != value else decimal

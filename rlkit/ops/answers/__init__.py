"""Final answers: found in a text, read completely in a form that is known, and compared.

A reference and an answer are read alike. What is in no known form is no answer, and equal to none.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

from rlkit.ops.answers import compare
from rlkit.ops.answers.extract import FinalAnswer, final_answer, marked_or_all
from rlkit.ops.answers.forms import LONGEST, read
from rlkit.ops.answers.markup import plain
from rlkit.ops.answers.nodes import UngradableError
from rlkit.ops.answers.values import Named, Number, Words, form_of

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


def equal(actual: str, expected: str) -> bool:
    """Whether two answers are the same number, formula, words or collection of these; 50% is both 50 and 0.5.

    Raises:
        UngradableError: The answer is too large to be compared.
    """
    answers = read(actual), read(expected)
    return answers[0] is not None and answers[1] is not None and compare.same(answers[0], answers[1])


def equal_at_once(actual: str, expected: str) -> bool | None:
    """Return the same where that takes microseconds: for numbers and words; None for formulae."""
    answers = read(actual), read(expected)
    if all(isinstance(answer, Number | Words | None) for answer in answers):
        return equal(actual, expected)
    return None


@lru_cache(1024)  # the samples of a prompt have one reference
def reference_of(text: str) -> str | None:
    """Return the answer in a reference: what it marks as one, else all of it.

    None if that is in no form that is read, or too large to be compared.
    """
    answer = marked_or_all(text)
    try:
        return answer if equal(answer, answer) else None
    except UngradableError:
        return None


def form_of_reference(text: str) -> str:
    """Return the name of the form of a reference, `in no form` if it cannot be read."""
    answer = reference_of(text)
    return form_of(None if answer is None else read(answer))


def form_of_completion(text: str) -> str:
    """Return the name of the form of a completion's final answer, `in no form` if it cannot be read."""
    answer = final_answer(text).text
    try:
        return form_of(None if answer is None else read(answer))
    except UngradableError:
        return "too large"


def canonical(answer: str) -> str:
    """Return one form for all answers that are the same number, or that differ in blanks and markup alone.

    Units and currencies are left out; a percentage stays one, and a long answer as it is.
    """
    if len(answer) > LONGEST:
        return answer
    try:
        value = read(answer)
    except UngradableError:
        value = None
    if isinstance(value, Named):
        value = value.value
    if not isinstance(value, Number):
        return "".join(plain(answer).casefold().split())
    return _decimal(value.readings[0]) + "%" * (value.unit == "percent")


def _decimal(value: Fraction) -> str:
    decimal = repr(float(value)) if abs(value) < 2**53 else ""
    return str(value) if value.denominator == 1 or not decimal or Fraction(decimal) != value else decimal

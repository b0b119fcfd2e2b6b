"""Whole numbers in English words: `eighty-four`, `two hundred and five`."""

from __future__ import annotations

import re

_TO_TEN = "one two three four five six seven eight nine ten "
_TO_NINETEEN = "eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_VALUES = {word: value for value, word in enumerate((_TO_TEN + _TO_NINETEEN).split(), start=1)}
_VALUES |= {"zero": 0} | {word: 10 * value for value, word in enumerate(_TENS.split(), start=2)}
_THOUSANDS = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
NUMBER_WORDS = frozenset({*_VALUES, *_THOUSANDS, "hundred"})

_DIGIT = "|".join(_TO_TEN.split()[:9])
_TEENS = "|".join(_TO_NINETEEN.split())
_BELOW_100 = rf"(?:(?:{'|'.join(_TENS.split())})(?:[- ](?:{_DIGIT}))?|{_TEENS}|ten|{_DIGIT}|zero)"
_BELOW_1000 = rf"(?:(?:{_DIGIT}) hundred(?:(?: and)? {_BELOW_100})?|{_BELOW_100})"
_GROUPS = "".join(rf"(?:{_BELOW_1000} {name}(?: (?:and )?(?=[a-z])|$))?" for name in reversed(_THOUSANDS))
_NUMBER = re.compile(f"{_GROUPS}(?:{_BELOW_1000})?", re.I)


def number_in_words(text: str) -> int | None:
    """Return the value of a number in words; None for any other text.

    >>> number_in_words("two hundred and eighty-four"), number_in_words("four eighty")
    (284, None)
    """
    if not text or not _NUMBER.fullmatch(text):
        return None
    total = group = 0
    for word in re.split("[- ]", text.lower()):
        if word in _THOUSANDS:
            total, group = total + group * _THOUSANDS[word], 0
        elif word == "hundred":
            group *= 100
        elif word != "and":
            group += _VALUES[word]
    return total + group

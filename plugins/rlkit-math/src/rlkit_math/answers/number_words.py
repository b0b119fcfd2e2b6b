"""Numbers in English words: `eighty-four`, `two hundred and five`, `three quarters`."""

from __future__ import annotations

import re
from fractions import Fraction

_TO_TEN = "one two three four five six seven eight nine ten "
_TO_NINETEEN = "eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_VALUES = {word: value for value, word in enumerate((_TO_TEN + _TO_NINETEEN).split(), start=1)}
_VALUES |= {"zero": 0} | {word: 10 * value for value, word in enumerate(_TENS.split(), start=2)}
_THOUSANDS = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
NUMBER_WORDS = frozenset({*_VALUES, *_THOUSANDS, "hundred"})
_PARTS = {f"{word}th": value for word, value in (_VALUES | _THOUSANDS | {"hundred": 100}).items() if value > 3}
_PARTS |= {f"{word[:-1]}ieth": _VALUES[word] for word in _TENS.split()}
_PARTS |= {"third": 3, "fifth": 5, "eighth": 8, "ninth": 9, "twelfth": 12}
_ORDINALS = _PARTS | {"first": 1, "second": 2}
_PARTS |= {"half": 2, "quarter": 4}
PART_WORDS = frozenset({*_ORDINALS, *_PARTS, *(f"{word}s" for word in _PARTS), "halves"})
_FRACTION = re.compile(r"(.+)[- ](?:([a-z]+?)(s?))")

_DIGIT = "|".join(_TO_TEN.split()[:9])
_TEENS = "|".join(_TO_NINETEEN.split())
_BELOW_100 = rf"(?:(?:{'|'.join(_TENS.split())})(?:[- ](?:{_DIGIT}))?|{_TEENS}|ten|{_DIGIT}|zero)"
_BELOW_1000 = rf"(?:{_BELOW_100} hundred(?:(?: and)? {_BELOW_100})?|{_BELOW_100})"
_GROUPS = "".join(rf"(?:{_BELOW_1000} {name}(?: (?:and )?(?=[a-z])|$))?" for name in reversed(_THOUSANDS))
_A_THOUSAND = re.compile(rf"^a (?=hundred|{'|'.join(_THOUSANDS)})", re.I)
_NUMBER = re.compile(f"{_GROUPS}(?:{_BELOW_1000})?", re.I)


def number_in_words(text: str) -> int | None:
    """Return the value of a number in words; None for any other text.

    >>> number_in_words("two hundred and eighty-four"), number_in_words("four eighty")
    (284, None)
    """
    text = _A_THOUSAND.sub("one ", text)
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


def fraction_in_words(text: str) -> Fraction | None:
    """Return the value of a fraction in words; None for any other text.

    >>> fraction_in_words("three quarters"), fraction_in_words("one-third"), fraction_in_words("three quarter")
    (Fraction(3, 4), Fraction(1, 3), None)
    """
    match = _FRACTION.fullmatch(text.lower().replace("halves", "halfs"))
    if match is None:
        return None
    above = 1 if match[1] in ("a", "an") else number_in_words(match[1])
    below = _PARTS.get(match[2])
    if above is None or below is None or (above != 1) is not bool(match[3]):
        return None
    return Fraction(above, below)


def ordinal_in_words(text: str) -> int | None:
    """Return the value of an ordinal in words; None for any other text.

    >>> ordinal_in_words("twenty-first"), ordinal_in_words("one twentieth")
    (21, None)
    """
    before, _, last = text.lower().replace("-", " ").rpartition(" ")
    tens, units = number_in_words(before.removesuffix(" and")) if before else 0, _ORDINALS.get(last)
    return None if tens is None or units is None or tens % 10 ** len(str(units)) else tens + units


def value_in_words(text: str) -> Fraction | None:
    """Return the value of a number in words, with a fraction or a scale; None for any other text.

    >>> value_in_words("two and three quarters"), value_in_words("two and a half million")
    (Fraction(11, 4), Fraction(2500000, 1))
    """
    for value in (number_in_words(text), fraction_in_words(text)):
        if value is not None:
            return Fraction(value)
    amount, _, scale = text.rpartition(" ")
    if scale in _THOUSANDS:
        value = value_in_words(amount)
        return None if value is None else value * _THOUSANDS[scale]
    integer_words, _, fraction_words = text.rpartition(" and ")
    integer, fraction = number_in_words(integer_words), fraction_in_words(fraction_words)
    return None if integer is None or fraction is None else integer + fraction

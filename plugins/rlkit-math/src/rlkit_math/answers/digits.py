"""Digits that are not compared by value: dates, times of day, ratios, ordinals, and numbers in another base."""

from __future__ import annotations

import re
from fractions import Fraction

from rlkit_math.answers.number_words import number_in_words
from rlkit_math.answers.units import alternatives, words_of
from rlkit_math.answers.values import Digits, Number, UnorderedItems

RANKED = alternatives("ranked")
"""What has a rank, which is a number: `the 17th term`."""
_ORDINAL = re.compile(rf"(?:the )?([0-9]+) ?\^?\{{? ?(st|nd|rd|th) ?\}}?( {RANKED})?", re.I)
_BASE = re.compile(
    r"(?:\\overline ?)?([({])?([0-9A-Za-z]+)(?(1)[)}])(?:_[{(]*(?:base)?([0-9]{1,2}|[A-Za-z]{3,7})[)}]*"
    r"|(?: in)? \(?base ([0-9]{1,2}|[A-Za-z]{3,7})\)?)"
)
_TWO_WORDS = re.compile("[A-Za-z]{2} +[A-Za-z0-9]")
_COLONS = re.compile(r"([0-9]+)((?: ?: ?[0-9]+)+)(?: ?([ap])\.? ?m\.?)?", re.I)
_MINUTES = re.compile("(?: ?: ?[0-5][0-9]){1,2}")
_HOUR = re.compile(r"([0-9]{1,2})(?: ?([ap])\.? ?m\.?| o'clock)", re.I)
_RATIO = re.compile(r"([0-9]+) to ([0-9]+)")
_RESIDUES = re.compile(
    r"([A-Za-z] ?(?:\\equiv|=) ?)?((?:-|\\pm ?)?[0-9]+(?:(?:, ?|,? ?(?:and|or) ?)(?:-|\\pm ?)?[0-9]+)*)"
    r" ?\(? ?(?:\\[pb]?)?mod ?\{? ?([0-9]+) ?\}? ?\)?"
)
"""Classes of residues: `n \\equiv 1, 5 \\pmod 6`, `3 (mod 7)`."""
_DAY = r"(?:the )?([0-9]{1,2})(?:\^? ?\{? ?(?:st|nd|rd|th) ?\}?)?"
_MONTH = rf"({'|'.join(f'{name[:3]}(?:{name[3:]})?' for name in words_of('month'))})\.?"
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_NUMERIC_DATE = re.compile(r"([0-9]{4})-(0[1-9]|1[0-2])-([0-3][0-9])")
_DATE = re.compile(rf"(?:{_MONTH} {_DAY}|{_DAY} (?:of )?{_MONTH})(?:,? ([0-9]{{4}}))?", re.I)


def parse_date(text: str) -> Digits | None:
    """Parse a day of a month, with or without its year, in any order of day and month; None for any other text."""
    numeric = _NUMERIC_DATE.fullmatch(text)
    if numeric is not None:
        return Digits("date", (_MONTHS[int(numeric[2]) - 1], str(int(numeric[3])), numeric[1]))
    match = _DATE.fullmatch(text)
    if match is None:
        return None
    month, day = (match[1], match[2]) if match[1] else (match[4], match[3])
    return Digits("date", (month[:3].lower(), str(int(day)), match[5] or ""))


def parse_residues(text: str) -> Digits | UnorderedItems | None:
    """Parse classes of residues, each with its modulus; None for any other text.

    `4 (mod 9)` is the remainder 4 as well as its class; `x = 4 (mod 9)`, `13 (mod 9)` and `4 mod 9` are not.
    """
    match = _RESIDUES.fullmatch(text)
    modulus = int(match[3]) if match is not None else 0
    if match is None or modulus == 0:
        return None
    signed = re.findall(r"(-|\\pm)? ?([0-9]+)", match[2])
    values = [int(digits) for sign, digits in signed if sign != "-"]
    values += [-int(digits) for sign, digits in signed if sign]
    if match[2].isdigit() and values[0] < modulus:
        is_remainder = not match[1] and re.search(r"\\pmod|\(", text) is not None
        return Digits("residue", (str(values[0]), str(modulus)), is_number=is_remainder)
    classes = [Digits("residue", (str(value), str(modulus))) for value in {value % modulus for value in values}]
    return classes[0] if len(classes) == 1 else UnorderedItems(tuple(classes))


def parse_digits(text: str) -> Digits | Number | None:
    """Parse a number with its base, an ordinal, a time of day or a ratio; None for any other text."""
    is_sentence = _TWO_WORDS.search(text.partition("_")[0]) is not None
    base = _BASE.fullmatch(text.replace(" ", "") if "_" in text and not is_sentence else text)
    if base is not None and any(map(str.isdigit, base[2])):
        name = base[3] or base[4]
        value = name if name.isdigit() else number_in_words(name)
        if str(value) == "10" and base[2].isdigit():
            return Number((Fraction(base[2]),))
        return None if value is None else Digits("base", (base[2].upper().lstrip("0"), str(value)))
    ordinal = _ORDINAL.fullmatch(text)
    if ordinal is not None:
        return Digits("ordinal", (ordinal[1], ordinal[2].lower()), is_number=ordinal[3] is not None)
    colons = _COLONS.fullmatch(text)
    if colons is not None:
        parts = tuple(str(int(part)) for part in text[: colons.end(2)].split(":"))
        is_time = _MINUTES.fullmatch(colons[2]) is not None
        return Digits("time" if is_time else "ratio", parts, (colons[3] or "").lower())
    hour = _HOUR.fullmatch(text)
    if hour is not None:
        return Digits("time", (str(int(hour[1])), "0"), (hour[2] or "").lower(), is_number=hour[2] is None)
    ratio = _RATIO.fullmatch(text)
    return None if ratio is None else Digits("ratio", (ratio[1], ratio[2]))

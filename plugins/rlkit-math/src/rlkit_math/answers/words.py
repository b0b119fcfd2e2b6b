"""Answers in words: names, letters of choices, shapes, and numbers that are spelled out."""

from __future__ import annotations

import re
from fractions import Fraction

from rlkit_math.answers.expression import FUNCTIONS
from rlkit_math.answers.number_words import value_in_words
from rlkit_math.answers.values import Number, Words

_LETTER = re.compile(r"\(?([A-Za-z])\)|[A-Za-z]")
CJK = r"\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7a3"
"""Characters of Chinese, Japanese and Korean, where no blank has to end a word."""
_WORD = rf"[^\W\d_{CJK}](?:[^\W\d_{CJK}]|['-])*\.?"
_WORDS = re.compile(rf"{_WORD}(?: {_WORD}){{0,4}}|(?![零〇一二两三四五六七八九十百千万亿半]+\.?$)[{CJK}]{{2,}}\.?")
_SHAPE = re.compile(r"\\(overline|overrightarrow|triangle|angle) ?\{? ?([A-Z]{1,4}) ?\}?")
_ARTICLE = re.compile(r"(?:an?|the) ", re.I)
_INFINITELY = re.compile(r"infinitely many [a-z]+", re.I)
_CLASS = re.compile(r"(?<=[a-z]{3}) (?:triangle|function|number|series|sequence)s?$")
"""What an adjective describes: `isosceles triangle`."""
_ABBREVIATIONS = {"dne": "does not exist"}
_TWO_LETTERS = frozenset({"no", "mr", "ms", "it", "he", "me", "up"})


def parse_number_in_words(text: str) -> Number | None:
    """Parse a number or a fraction in words; None for anything else."""
    number = Fraction(1, 2) if text.lower() == "half" else value_in_words(text)
    return None if number is None else Number((number,))


def parse_words(text: str) -> Words | Number | None:
    """Return an answer in words, a letter or a named shape; a number in words is a number, None for anything else."""
    number = parse_number_in_words(text)
    if number is not None:
        return number
    letter = _LETTER.fullmatch(text)
    if letter is not None:
        return Words(letter[1] or text)
    shape = _SHAPE.fullmatch(text)
    if shape is not None:
        return Words(" ".join(shape.groups()))
    if not _WORDS.fullmatch(text) or len(text) > 60:
        return None
    runs = re.findall(r"[^\W\d_]+", text)
    if any((len(run) > 1 + run.isascii() and run not in FUNCTIONS) or run.lower() in _TWO_LETTERS for run in runs):
        text = _CLASS.sub("", text)
        text = _ABBREVIATIONS.get(text.lower(), text)
        return Words(_INFINITELY.sub("infinitely many", _ARTICLE.sub("", text)).replace(".", ""))
    return None

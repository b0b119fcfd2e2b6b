"""Numbers of prose in digits: in words, with glyphs, with scales, and with the decimal commas of other languages."""

# ruff: noqa: RUF001 (answers contain these characters)

from __future__ import annotations

import re
from fractions import Fraction

from rlkit_math.answers.digits import RANKED
from rlkit_math.answers.markup import without_european_groups
from rlkit_math.answers.number_words import NUMBER_WORDS, PART_WORDS, ordinal_in_words, value_in_words
from rlkit_math.answers.phrases import ROUNDING
from rlkit_math.answers.quantities import SCALES
from rlkit_math.answers.units import alternatives, table

_WORD = "|".join(sorted(NUMBER_WORDS | PART_WORDS, key=len, reverse=True))
_WORDS = re.compile(rf"(?<![\w-])(?:an? )?(?:{_WORD})(?:(?:[- ]| and )(?:an? )?(?:{_WORD}))*(?![\w-])", re.I)
_START_OF_SENTENCE = re.compile(r"(?:^|[.!?:] |\n)[\W_]*$")
_DEFINITE = re.compile(rf"\b{alternatives('definite')} $", re.I)
"""What is before a number that repeats what is known: `the two baskets`."""
_COUNTED_ONE = re.compile(rf"\b{alternatives('counting')} $", re.I)
_PRONOUN = re.compile(r" (?:of|that|which|who|can|could|may|must|way)\b")
_SCALED = re.compile(rf"(?<![0-9.,/])([0-9]+(?:,[0-9]{{3}})*(?:\.[0-9]+)?) ({'|'.join(SCALES)})\b(?!-)")
_FRACTIONS = {glyph: f" {text}" for glyph, text in table("notation.txt", "=") if re.fullmatch("[0-9]/[0-9]", text)}
_GLYPHS = str.maketrans(_FRACTIONS | {"−": "-", "⁄": "/"})
_SHIFTED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹−", "-0123456789-")
_POWER_OF_TEN = re.compile(
    r"(?<=[0-9]) ?(?:[×x*·⋅]|\\times|\\cdot) ?10(?: ?\^ ?\{? ?([-−]?[0-9]{1,3})(?![0-9])(?: ?\})?|([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]{1,4}))"
)
_DECIMAL_COMMA = re.compile(r"(?<![0-9.,(\[{])([0-9]+),([0-9]{1,2}|[0-9]{4,})(?![0-9,])")
_LANGUAGE = re.compile(rf"\b{alternatives('comma')}\b", re.I)
"""Words of languages with a decimal comma, in sentences about a single result."""
_RULES = [(re.compile(pattern), spelling) for pattern, spelling in table("prose.txt", "=>")]


def in_digits(text: str) -> str:
    """Return prose with its numbers in digits, as English writes them, and without remarks on their rounding.

    >>> in_digits("It takes two and a half million years."), in_digits("Der Preis beträgt 1.234,50 €.")
    ('It takes 2500000 years.', 'Der Preis beträgt 1234.50 €.')
    """
    text = ROUNDING.sub("", _POWER_OF_TEN.sub(lambda match: f"e{match[1] or match[2]}".translate(_SHIFTED), text))
    text = re.sub(r"(?<![0-9]) (?= [0-9]/)", "", text.translate(_GLYPHS))
    text = _WORDS.sub(_number, with_decimal_points(text))
    for pattern, spelling in _RULES:
        text = pattern.sub(spelling, text)
    return _SCALED.sub(_multiplied, text)


def with_decimal_points(text: str) -> str:
    """Return a text with English separators in its numbers; the language of a decimal comma must be evident."""
    text = without_european_groups(text)
    if not _LANGUAGE.search(text):
        return text
    return re.sub(r"\b(?:oder|ou)\b", "or", re.sub(r"\b(?:und|et)\b", "and", _DECIMAL_COMMA.sub(r"\1.\2", text)))


def _number(match: re.Match[str]) -> str:
    """Return a number, a fraction or a rank in digits; words that mean something else stay."""
    before, words, after = match.string[: match.start()], match[0], match.string[match.end() :]
    if words != words.lower() and not (words[1:].islower() and _START_OF_SENTENCE.search(before)):
        return words
    rank = ordinal_in_words(words)
    if rank is not None:
        return f"{rank}th" if re.match(rf" {RANKED}\b", after) else words
    is_pronoun = words.lower() == "one" and not (_COUNTED_ONE.search(before) and not _PRONOUN.match(after))
    if is_pronoun or _DEFINITE.search(before):
        return words
    values = [value_in_words(words)]
    if values == [None]:  # two numbers: `ten and twelve`
        values = [value_in_words(part) for part in words.split(" and ")]
    mixed = [divmod(value, 1) for value in values if value is not None]
    numerals = [f"{n} {part}" if n and part else str(n + part) for n, part in mixed]
    return " and ".join(numerals) if len(numerals) == len(values) else words


def _multiplied(match: re.Match[str]) -> str:
    product = Fraction(match[1].replace(",", "")) * SCALES[match[2]]
    return str(product) if product.denominator == 1 else match[0]

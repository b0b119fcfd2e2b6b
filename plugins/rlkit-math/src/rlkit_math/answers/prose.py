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
_DOUBTFUL = re.compile(
    rf"\b(?!remainder is)(?:{alternatives('changing')}|{alternatives('hedging')}|(?:square|cube) of)\b|[?≠∉]", re.I
)
_DOUBTFUL_IN_WORDS = re.compile(
    rf"\b{alternatives('doubtful')}\b|\b(?:more|up)\W*$|\bup to\b|\bover \w|\bper cent"
    r"|\bwe (?!get|obtain|find|end|conclude|need|count)|\bI\b|;|^\W*\(",
    re.I,
)
_STATING = re.compile(rf"\b{alternatives('stating')}\b", re.I)
_ALONE = re.compile(rf"\W*(?:(?:minus|negative) )?{_WORDS.pattern}(?: [a-z]+){{0,4}}\W*$", re.I)
"""A number in words with what it counts, and no more."""
_DEFINITE = re.compile(rf"\b{alternatives('definite')} $", re.I)
"""What is before a number that repeats what is known: `the two baskets`."""
_MINUS = re.compile(rf"(?:^\W*|\b(?:is|was|to|equals|get) |= )(?:minus|negative) (?=[0-9]|\W*$|(?:{_WORD})\b)", re.I)
_SCALED = re.compile(rf"(?<![0-9.,/])([0-9]+(?:,[0-9]{{3}})*(?:\.[0-9]+)?) ({'|'.join(SCALES.keys() - {'k'})})\b(?!-)")
_FRACTIONS = {glyph: f" {text}" for glyph, text in table("notation.txt", "=") if re.fullmatch("[0-9]/[0-9]", text)}
_GLYPHS = str.maketrans(_FRACTIONS | {"−": "-", "⁄": "/"})
_SHIFTED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹−", "-0123456789-")
_POWER_OF_TEN = re.compile(
    r"(?<=[0-9]) ?(?:[×x*·⋅]|\\times|\\cdot) ?10(?: ?\^ ?\{? ?([-−]?[0-9]{1,3})(?![0-9])(?: ?\})?|([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]{1,4}))"
)
_DECIMAL_COMMA = re.compile(r"(?<![0-9.,(\[{])([0-9]+),([0-9]{1,2}|[0-9]{4,})(?![0-9,])")
_LANGUAGE = re.compile(rf"\b{alternatives('comma')}\b", re.I)
"""Words of languages with a decimal comma, in sentences about a single result."""
_SEVERAL = re.compile(
    r"\b(?:Lösungen|Nullstellen|sind|soluciones|raíces|son|racines|sont|soluzioni|sono|soluções|são|корни)\b", re.I
)
_JOINT = re.compile(r"(?<=[0-9)$]) (?:und|et|y|e|и) (?=\$?(?:[a-z](?:_[0-9])? ?= ?)?[-−(]?\$?[0-9(\\])")
"""What joins two values in sentences of other languages about several."""
_RULES = [(re.compile(pattern), spelling) for pattern, spelling in table("prose.txt", "=>")]


def in_digits(text: str) -> str:
    """Return prose with the numbers of its last sentence in digits, as English writes them.

    Words are read only in a sentence that states one number, and only if no other word is doubtful.

    >>> in_digits("It takes two and a half million years."), in_digits("Der Preis beträgt 1.234,50 €.")
    ('It takes 2500000 years.', 'Der Preis beträgt 1234.50 €.')
    """
    text = ROUNDING.sub("", _POWER_OF_TEN.sub(lambda match: f"e{match[1] or match[2]}".translate(_SHIFTED), text))
    text = re.sub(r"(?<![0-9]) (?= [0-9]/)", "", text.translate(_GLYPHS))
    start = max(text.rstrip().rfind(end) for end in (". ", "! ", "? ")) + 1
    sentence = with_decimal_points(text[start:])
    sentence = _JOINT.sub(" and ", sentence) if _SEVERAL.search(sentence) else sentence
    is_single = len(_WORDS.findall(sentence)) == 1
    if is_doubtful(_WORDS.sub("0", sentence) if is_single else sentence, in_words=True):
        return text[:start] + sentence
    if is_single and (_STATING.search(sentence) or _ALONE.match(sentence)) and not re.search("[0-9]", sentence):
        sentence = _WORDS.sub(_number, sentence)
    sentence = _MINUS.sub(lambda minus: re.sub("(?:minus|negative) $", "-", minus[0], flags=re.I), sentence)
    for pattern, spelling in _RULES:
        sentence = pattern.sub(spelling, sentence)
    numbers = re.findall(r"[0-9][0-9.,]*", sentence)
    return text[:start] + (_SCALED.sub(_multiplied, sentence) if len(numbers) == 1 else sentence)


def is_doubtful(sentence: str, in_words: bool = False) -> bool:
    """Whether a word of a sentence denies, doubts or compares what it states; more words do it to one in words."""
    sentence = _MINUS.sub("", sentence)
    return _DOUBTFUL.search(sentence) is not None or (in_words and _DOUBTFUL_IN_WORDS.search(sentence) is not None)


def with_decimal_points(text: str) -> str:
    """Return a text with English separators in its numbers; the language of a decimal comma must be evident."""
    text = without_european_groups(text)
    if len(re.findall("[0-9][0-9.,]*", text)) != 1 or not _LANGUAGE.search(text) or is_doubtful(text, in_words=True):
        return text
    return re.sub(r"\b(?:oder|ou)\b", "or", re.sub(r"\b(?:und|et)\b", "and", _DECIMAL_COMMA.sub(r"\1.\2", text)))


def _number(match: re.Match[str]) -> str:
    """Return a number, a fraction or a rank in digits; words that mean something else stay."""
    before, words, after = match.string[: match.start()], match[0], match.string[match.end() :]
    if words != words.lower() and not (words[1:].islower() and _START_OF_SENTENCE.search(before)):
        return words
    rank = ordinal_in_words(words)
    if rank is not None:
        return f"{rank}th" if before.strip() and re.match(rf" {RANKED}\b", after) else words
    value = value_in_words(words)
    if value is None or words.lower() == "one" or _DEFINITE.search(before) or re.match(r" (?:to |[A-Z])", after):
        return words
    integer, part = divmod(value, 1)
    is_stated = before.endswith((" is ", " was ", " equals ")) or re.match(r" (?!(?:of|is|and|in)\b)[a-z]{3}", after)
    if integer and part and not is_stated:
        return words
    return f"{integer} {part}" if integer and part else str(value)


def _multiplied(match: re.Match[str]) -> str:
    product = Fraction(match[1].replace(",", "")) * SCALES[match[2]]
    return str(product) if product.denominator == 1 else match[0]

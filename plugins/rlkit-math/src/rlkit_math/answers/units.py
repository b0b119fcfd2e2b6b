"""Words beside a number that do not change it: currencies, units and counted nouns."""

from __future__ import annotations

import math
import re
from collections import Counter
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

from rlkit_math.answers.number_words import NUMBER_WORDS


def table(name: str, separator: str = "|") -> list[list[str]]:
    """Return the rows of a table beside this module, without its comments."""
    lines = (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.split(separator)] for line in lines if not line.startswith("#")]


def words_of(group: str) -> frozenset[str]:
    """Return the words in a group of `words.txt`."""
    return frozenset(word for name, words in table("words.txt") if name == group for word in words.split())


def alternatives(group: str) -> str:
    """Return a regular expression of the words in a group of `words.txt`."""
    return f"(?:{'|'.join(sorted(words_of(group), key=len, reverse=True))})"


_ROWS = [(names.split(), symbols.split(), definition) for names, symbols, definition in table("units.txt")]
_PREFIXES = {names[0][:-1]: (symbols[0], amount) for names, symbols, amount in _ROWS if names[0].endswith("-")}
_UNITS = [row for row in _ROWS if not row[0][0].endswith("-")]
_DEFINITIONS = {names[0]: definition for names, _, definition in _UNITS if definition}
UNITS_BY_LETTER = {symbol: names[0] for names, symbols, _ in _UNITS for symbol in symbols if len(symbol) == 1} | {
    "h": "hour"
}
"""Units of single letters, which are variables where they are not in a font of text."""
UNITS_BY_SPELLING: dict[str, str] = {}
"""Units by their spellings; not by single capital letters but for litres."""
for _names, _symbols, _ in _UNITS:
    for _prefix, (_symbol, _amount) in _PREFIXES.items() if _symbols else ():
        _DEFINITIONS[_prefix + _names[0]] = f"{_amount} {_names[0]}"
        UNITS_BY_SPELLING |= {_symbol + symbol: _prefix + _names[0] for symbol in _symbols}
        UNITS_BY_SPELLING |= {_prefix + name: _prefix + _names[0] for name in _names}
    plain = [symbol for symbol in _symbols if len(symbol) > 1 or symbol.islower() or symbol == "L"]
    UNITS_BY_SPELLING |= dict.fromkeys([*_names, *plain], _names[0])
for _foreign, _english in table("foreign.txt", "="):
    UNITS_BY_SPELLING |= {
        spelling: UNITS_BY_SPELLING[_english.removesuffix("s")]
        for name in _foreign.split()
        for spelling in (name, name.lower())
        if name.isascii()
    }
_WITHOUT_RATE = frozenset({"cent", "euro", "pound-sterling", "yen", "rupee", "degree"})
"""Base units that may stand for their rate: dollars for dollars per day, degrees for degrees Celsius."""

_CHANGES = words_of("changing")
_HEDGES = words_of("hedging")
_MULTIPLES = (NUMBER_WORDS | words_of("multiplying")) - {"one"}
_NOT_UNITS = _CHANGES | _MULTIPLES | words_of("other") | words_of("month")
_NOT_A_NOUN = re.compile(
    r"(?!(?:family|fly|jelly|lily|supply)$)\w+ly|(?!(?:seed|feed|weed|speed|breed|sided)$)\w{3,}ed|\w+fold"
    r"|odd|even|binary|octal|hex|hexadecimal|max|maximum|minimum|tops|down|into|backwards|fake|lol|idk"
)
"""Adverbs, participles and the like, which name no unit when they stand alone: `presumably`, `rejected`, `even`."""
_CONNECTIONS = frozenset({"per", "of", "a", "an", "each", "every", "the", "in", "for"})
_RATES = frozenset({"per", "a", "an", "each", "every"})
_WORD = r"[A-Za-z](?:[A-Za-z'-]*[A-Za-z])?\.?"
_POWER = r"(?:\^(?:\{?[23]\}?))?"
_UNIT = re.compile(rf"(?:/ ?)?{_WORD}{_POWER}(?:(?: ?/ ?| ?\* ?| ){_WORD}{_POWER})*")
_PIECE = re.compile(rf"(/)?(?: ?)({_WORD})({_POWER})")
_DIMENSIONS = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}
ALTOGETHER = re.compile(
    r"(?:^| )(?:in total|total|in all|each|apiece|altogether|left|remaining|times(?: as (?:many|much))?)$"
)
_MEASURED = re.compile(rf"(?<=[\w.]) {alternatives('measured')}$")
"""What a quantity says, not its unit: `2 inches long`."""
_INCH = re.compile(r"^((?:(?:square|sq\.?|cubic|cu\.?) )?)in\.?(?=$|\^)")
"""Inches, as opposed to the connection `in`."""
_INVERSE = re.compile(r"[ *]*\b([A-Za-z]+) ?\^ ?\{? ?-([123]) ?\}?")
"""A unit below, such as `h^{-1}`."""
_RAISED_UNIT = re.compile(r"\b([A-Za-z]+) (squared|cubed)\b")
_SYMBOL_NAMES = {"Omega": "ohm", "mu": "u"}
_SYMBOLS = re.compile(r"\\(Omega|mu)(?![A-Za-z]) ?")
_BELOW = re.compile(r"/ ?\(([^()]*)\)")
"""What is below in brackets: `J/(kg K)`."""
_OF_WHOLE = re.compile(r"^of (?:the|an?) (?=[a-z])")
_TEMPERATURE = re.compile(
    r"(?:(?:degrees?|deg|grade?|grad[io]s?|graus|degrés) )?(?:celsius|centigrade|(fahrenheit))", re.I
)
MAX_WORDS = 5
"""Maximum number of words of a unit."""


def unit_of(text: str) -> str | None:
    """Return the unit in the words after a number; empty for an unknown unit, None if the words are not a unit.

    >>> unit_of("square feet per day"), unit_of("clips"), unit_of("squared")
    ('foot^2/day', '', None)
    """
    text = text.strip(" .")
    text = text[1:-1].strip() if text.startswith("(") and text.endswith(")") else text
    text = _OF_WHOLE.sub("", _SYMBOLS.sub(lambda match: _SYMBOL_NAMES[match[1]], text))
    text = _BELOW.sub(r"/\1", text)
    text = _RAISED_UNIT.sub(_with_power, _INVERSE.sub(r"/\1^\2", text).replace("^1", ""))
    text = _INCH.sub(r"\1inch", _MEASURED.sub("", ALTOGETHER.sub("", text)))
    if not text:
        return ""
    if text in UNITS_BY_SPELLING:
        return UNITS_BY_SPELLING[text]
    temperature = _TEMPERATURE.fullmatch(text)
    if temperature is not None:
        return "degree/F" if temperature[1] else "degree/C"
    if not _UNIT.fullmatch(text):
        return None
    pieces = [(slash, word.rstrip("."), power) for slash, word, power in _PIECE.findall(text)]
    words = [word.lower() for _, word, _ in pieces]
    parts = {part for word in words for part in (word, *word.split("-"))}
    if len(words) > MAX_WORDS or words[-1] in _CONNECTIONS or not _NOT_UNITS.isdisjoint(parts):
        return None
    letters = {word for _, word, _ in pieces if len(word) == 1} - _CONNECTIONS - UNITS_BY_SPELLING.keys()
    if letters and (len(pieces) == 1 or not letters <= UNITS_BY_LETTER.keys()):
        return None
    if words[0] in _CONNECTIONS - {"per"} or _NOT_A_NOUN.fullmatch(words[-1] if len(words) == 1 else ""):
        return None
    return _canonical(pieces)


def _with_power(match: re.Match[str]) -> str:
    """Return `second squared` as `second^2`; words that are no unit stay."""
    word = match[1].lower().removesuffix("s")
    return f"{match[1]}^{2 if match[2] == 'squared' else 3}" if word in UNITS_BY_SPELLING else match[0]


def changes_number(word: str, hedged: bool = False) -> bool:
    """Whether a word beside a number changes it, doubts it, or compares it; hedged is also what is not marked."""
    return word.lower() in _CHANGES or (hedged and word.lower() in _HEDGES)


def multiplies_number(word: str) -> bool:
    """Whether a word after a number multiplies it, such as `dozen`."""
    return word.lower() in _MULTIPLES


def counted(text: str, unit: str) -> frozenset[str]:
    """Return the words after a number that tell it from others: all beside an unknown unit, else what is measured."""
    measured = _MEASURED.search(text) if unit else None
    words = text if not unit else "" if measured is None else measured[0]
    return frozenset(word.lower().removesuffix("s") for word in re.findall("[A-Za-z]+", words))


def are_nouns(words: list[str]) -> bool:
    """Whether words may name a counted thing."""
    names = {"number", "total", "sum", "score", "scores"}
    return (_NOT_UNITS - names).isdisjoint(word.lower() for word in words)


def _canonical(pieces: list[tuple[str, str, str]]) -> str:
    """Return a unit with its power, such as `mile/hour`; without what is below if that is unknown, else empty."""
    dimension = ""
    name = ""
    for position, (slash, word, power) in enumerate(pieces):
        lowered = word.lower()
        if slash or (position and lowered in _CONNECTIONS):
            following = pieces[position + 1 :]
            below = [("", word, power), *following] if slash else following if lowered in _RATES else []
            rate = _canonical(below)
            return f"{name}/{rate}" if rate else name
        if lowered in _DIMENSIONS and position == 0 and len(pieces) > 1:
            dimension = _DIMENSIONS[lowered]
            continue
        unit = _spelled(word)
        if unit is None:
            return ""
        name += "*" * bool(name) + unit + (f"^{power.strip('^{}')}" if power else dimension)
        dimension = ""
    return name


def _spelled(word: str) -> str | None:
    """Return the unit that a word names, in its own case, since mW is not MW, else in any."""
    spellings = (word, word.lower(), word.lower().removesuffix("s"))
    return UNITS_BY_LETTER.get(word) or next(filter(None, map(UNITS_BY_SPELLING.get, spellings)), None)


def conversion(actual: str, expected: str) -> Fraction | None:
    """Return the factor from a unit to another, 1 if one of them is unknown; None if they measure different things.

    A dollar is one a day, but one a day is none a week, and a metre none a second.

    >>> conversion("kilometre/hour", "metre/second"), conversion("gram", "second")
    (Fraction(5, 18), None)
    """
    if not actual or not expected or actual == expected or {actual, expected} == {"pound", "pound-sterling"}:
        return Fraction(1)
    (factor, powers), (expected_factor, expected_powers) = _in_base_units(actual), _in_base_units(expected)
    above, below, expected_above, expected_below = +powers, -powers, +expected_powers, -expected_powers
    is_currency = above == expected_above and above and _WITHOUT_RATE.issuperset(above)
    if is_currency and below != expected_below and (not below or not expected_below):
        return conversion(actual.partition("/")[0], expected.partition("/")[0])
    if below != expected_below or (above != expected_above and above and expected_above):
        return None
    return factor / expected_factor


@lru_cache(1024)
def _in_base_units(unit: str) -> tuple[Fraction, Counter[str]]:
    """Return a unit as a factor and the powers of base units, negative for those below."""
    factor, powers = Fraction(1), Counter[str]()
    above, *below = unit.split("/")
    for piece in [*above.split("*"), *(f"{name}^-1" for part in below for name in part.split("*"))]:
        name, *exponents = piece.split("^")
        exponent = math.prod(map(int, exponents))
        amount, _, base = _DEFINITIONS.get(name, "").partition(" ")
        inner_factor, inner_powers = _in_base_units(base) if base else (Fraction(1), {name: 1} if name else {})
        factor *= (Fraction(amount or 1) * inner_factor) ** exponent
        powers.update({base_unit: power * exponent for base_unit, power in inner_powers.items()})
    return factor, powers

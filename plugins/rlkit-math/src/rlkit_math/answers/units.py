"""Words beside a number that do not change it: currencies, units and counted nouns."""

from __future__ import annotations

import re

from rlkit_math.answers.number_words import NUMBER_WORDS

_NAMES = (
    "kilometre kilometer km", "metre meter m", "centimetre centimeter cm", "millimetre millimeter mm",
    "inch inches in", "foot feet ft", "yard yd", "mile mi", "kilogram kilo kg", "gram g", "milligram mg", "tonne",
    "ton", "pound lb lbs", "ounce oz", "litre liter l L", "millilitre milliliter ml", "gallon gal", "quart qt", "pint",
    "second sec s", "minute min mins", "hour hr hrs h", "day", "week", "month", "year yr yrs", "dollar usd ¤ US¤ buck",
    "cent ¢", "euro eur €", "pound-sterling gbp £", "yen ¥ jpy", "rupee ₹ inr Rs rs", "radian rad", "degree",
    "percent %", "mile/hour mph", "kilometre/hour kph", "millisecond ms", "newton", "joule", "watt", "volt",
)  # fmt: skip
UNITS_BY_SPELLING = {word: names.split()[0] for names in _NAMES for word in names.split()}
"""Units by their spellings."""
WITHOUT_RATE = frozenset({"dollar", "cent", "euro", "pound-sterling", "yen", "rupee", "degree"})
"""Units that may stand for their rate: dollars for dollars per day, degrees for degrees Celsius."""

_CHANGING_WORDS = """
    minus plus times divided divide multiplied multiply subtract subtracted squared cubed halved doubled tripled
    quadrupled negated inverted reversed raised negative negation half halve halves twice thrice double triple
    quadruple quarter third thirds fourth fourths fifth fifths sixth sixths seventh sevenths eighth eighths
    ninth ninths eleventh elevenths twelfth twelfths millionth millionths tenth tenths hundredth hundredths
    thousandth thousandths hundreds thousands fold twofold pct sqrt root factorial mod modulo log ln reciprocal inverse
    opposite power exponent choose remainder
    not no non nor neither never cannot isn aren wasn isn't aren't wasn't doesn't don't can't won't false wrong
    incorrect untrue unlikely undefined unknown error
    or xor either between versus vs except unless without instead otherwise rather maybe perhaps possibly probably
    might guess unsure wait oops nope
    than least most exceeds exceed exceeding under below beyond approximately approx roughly nearly almost near about
    until upto within
"""
_CHANGES = frozenset(_CHANGING_WORDS.split())
"""Words that change a number, doubt it, or compare it with another number."""

_MULTIPLYING_WORDS = """
    tens dozen dozens gross score scores myriad myriads lakh lakhs crore crores millions billions trillions
    quadrillion quadrillions quintillion quintillions mega giga tera milli micro mille permille ppm bps
"""
_MULTIPLES = (NUMBER_WORDS | frozenset(_MULTIPLYING_WORDS.split())) - {"one"}
"""Words that multiply the number before them, where they are no names of things."""

_OTHER_WORDS = """
    a-half above actually add added after all also alternatively although always and another answer any around as
    at base because before behind besides but by can choice common complement conjugate correct correction could
    decrease decreased dec did different do does e.g else equal equals et etc even-though excluded excluding few
    fewer first from had has have having he hence hex her his hmm however i i.e if ignore ignored including
    increase increased index inf infinity is ish it its just less like lots many may more much must my name nan
    next nil negatives note now null number o'clock oct odd-one off on one only option other our out over pi point
    previous prime product quotient reciprocals result reverse right rounded sample she shall short should shy sic
    since so solution some something somewhat sorry such sum that their them then there therefore these they this
    those though through thus till to total true up upside use using value january february march april june july
    august september october november december was we were what when where whereas whether which while who whose
    will with would x y z yes yet you your am pm are be been being anyway edit final hint st nd rd th
"""
_OTHER_STATEMENTS = frozenset(_OTHER_WORDS.split())
"""Other words that are not units, such as those that begin another statement."""
_NOT_UNITS = _CHANGES | _MULTIPLES | _OTHER_STATEMENTS

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
_ALTOGETHER = re.compile(
    r"(?:^| )(?:in total|total|in all|each|apiece|altogether|left|remaining|times(?: as (?:many|much))?)$"
)
_INCH = re.compile(r"^((?:(?:square|sq\.?|cubic|cu\.?) )?)in\.?(?=$|\^)")
"""Inches, as opposed to the connection `in`."""
_INVERSE = re.compile(r"[ *]*\b([A-Za-z]+) ?\^ ?\{? ?-([123]) ?\}?")
"""A unit below, such as `h^{-1}`."""
_RAISED_UNIT = re.compile(r"\b([A-Za-z]+) (squared|cubed)\b")
_OF_WHOLE = re.compile(r"^of (?:the|an?) (?=[a-z])")
MAX_WORDS = 5
"""Maximum number of words of a unit."""


def unit_of(text: str) -> str | None:
    """Return the unit in the words after a number; empty for an unknown unit, None if the words are not a unit.

    >>> unit_of("square feet per day"), unit_of("clips"), unit_of("squared")
    ('foot^2/day', '', None)
    """
    text = text.strip(" .")
    text = text[1:-1].strip() if text.startswith("(") and text.endswith(")") else text
    text = _OF_WHOLE.sub("", text)
    text = _RAISED_UNIT.sub(_with_power, _INVERSE.sub(r"/\1^\2", text).replace("^1", ""))
    text = _INCH.sub(r"\1inch", _ALTOGETHER.sub("", text))
    if not text:
        return ""
    if text in UNITS_BY_SPELLING:
        return UNITS_BY_SPELLING[text]
    if not _UNIT.fullmatch(text):
        return None
    pieces = [(slash, word.rstrip("."), power) for slash, word, power in _PIECE.findall(text)]
    words = [word.lower() for _, word, _ in pieces]
    parts = {part for word in words for part in (word, *word.split("-"))}
    if len(words) > MAX_WORDS or words[-1] in _CONNECTIONS or not _NOT_UNITS.isdisjoint(parts):
        return None
    if any(len(word) == 1 and word not in UNITS_BY_SPELLING and word not in _CONNECTIONS for _, word, _ in pieces):
        return None
    if words[0] in _CONNECTIONS - {"per"} or _NOT_A_NOUN.fullmatch(words[-1] if len(words) == 1 else ""):
        return None
    return _canonical(pieces)


def _with_power(match: re.Match[str]) -> str:
    """Return `second squared` as `second^2`; words that are no unit stay."""
    word = match[1].lower().removesuffix("s")
    return f"{match[1]}^{2 if match[2] == 'squared' else 3}" if word in UNITS_BY_SPELLING else match[0]


def changes_number(word: str) -> bool:
    """Whether a word beside a number changes it, doubts it, or compares it."""
    return word.lower() in _CHANGES


def multiplies_number(word: str) -> bool:
    """Whether a word after a number multiplies it, such as `dozen`."""
    return word.lower() in _MULTIPLES


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
        unit = UNITS_BY_SPELLING.get(lowered) or UNITS_BY_SPELLING.get(lowered.removesuffix("s"))
        if unit is None or name:
            return ""
        name = unit + (f"^{power.strip('^{}')}" if power else dimension)
    return name

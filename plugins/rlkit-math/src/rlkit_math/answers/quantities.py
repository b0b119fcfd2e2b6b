"""Numbers and formulae with a currency or a unit."""

from __future__ import annotations

import re
from fractions import Fraction

from rlkit_math.answers import evaluate
from rlkit_math.answers.expression import parse
from rlkit_math.answers.markup import CURRENCY
from rlkit_math.answers.nodes import ExpressionNode, is_finished
from rlkit_math.answers.units import ALTOGETHER, UNITS_BY_LETTER, are_nouns, conversion, counted, unit_of
from rlkit_math.answers.values import Formula, Number

_NUMBER = re.compile(
    r"(?P<sign>[-+]?) ?(?P<currency>(?:US)?¤|[€£¥₹]|USD |EUR |GBP |INR |Rs\.? ?)? ?(?P<inner_sign>(?<=[¤€£¥₹ ])[-+])?"
    r"(?P<digits>[0-9]{1,3}(?: [0-9]{3})+(?![0-9])|[0-9]+)?(?P<decimals>\.[0-9]+|\.(?=$))?"
    r"(?P<power>[eE][-+]?[0-9]{1,3}(?![0-9A-Za-z.]))?"
    r"(?:(?P<mixed> [0-9]+)(?= ?/ ?[0-9]))?(?: ?/ ?(?P<below>[0-9]+)(?![0-9.]))?(?![0-9._!^*]|/ ?[^A-Za-z ])"
)
SCALES = {
    "k": 10**3, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
    "dozen": 12, "gross": 144, "bn": 10**9, "mn": 10**6, "lakh": 10**5, "crore": 10**7,
}  # fmt: skip
_SCALE = re.compile(r" ?(k|hundred|thousand|million|billion|trillion|dozen|gross|bn|mn|lakh|crore)\b(?!-)", re.I)
_DEGREES = re.compile(r" ?\^ ?(?:\{ ?)?\\circ ?\}? ?[CF]?")
_PART = re.compile(r"¤[0-9]+(?![0-9])|(?<![0-9.])[0-9]+(?:\.[0-9]+)? ?[A-Za-z]+")
_COMPOUND = re.compile(rf"(?:{_PART.pattern})(?:,? ?(?:and )?(?:{_PART.pattern})){{1,3}}")
_HOURS = re.compile(r"([0-9]+) ?h ?([0-9]{1,2}) ?m(?:in)?")
_DECIMAL_COMMA = re.compile(
    r"(?P<currency>(?:€|EUR) ?)?(?P<digits>-?[0-9]+),(?P<decimals>[0-9]{1,2}|[0-9]{4,})"
    r"(?(currency)| ?(?P<unit>[A-Za-z%€£].*))"
)
_CAPITAL = re.compile(r" [NJWVAFTC]\.?")
"""Symbols of units after a blank, where a product has none: `20 N`."""
_ORDINAL = re.compile(r"[0-9]+(?:st|nd|rd|th)\b")
_NOUN = re.compile(" [A-Za-z]{3}| sq | per | of (?:the|an?) ")


def parse_number(text: str) -> Number | None:
    """Parse a number in digits with a currency or a unit; None for any other text."""
    match = _NUMBER.match(text)
    if match is None or not (match["digits"] or match["decimals"]) or match[0].endswith(("..", "+", "-")):
        return None
    value = _quantity(match)
    return None if value is None else _with_unit(value, text[match.end() :], match["currency"])


def parse_decimal_comma(text: str) -> Number | None:
    """Parse a decimal number with a comma, such as `2,5 m`; only with a known unit, for `2,5` is a list."""
    match = _DECIMAL_COMMA.fullmatch(text)
    if match is None:
        return None
    number = parse_number(f"{match['digits']}.{match['decimals']} {match['unit'] or match['currency']}")
    return number if number is not None and number.unit else None


def parse_compound(text: str) -> Number | None:
    """Parse a quantity in several units, such as `2 hours 30 minutes`, in the first unit; None for any other text."""
    text = _HOURS.sub(r"\1 h \2 min", ALTOGETHER.sub("", text))
    if not _COMPOUND.fullmatch(text):
        return None
    parts = [parse_number(part) for part in _PART.findall(text)]
    quantities = [part for part in parts if part is not None and part.unit]
    factors = [conversion(part.unit, quantities[0].unit) or 0 for part in quantities]
    amounts = [part.readings[0] * factor for part, factor in zip(quantities, factors, strict=True)]
    if len(amounts) < len(parts) or not all(factors) or any(amount >= 1 for amount in amounts[1:]):
        return None
    return Number((sum(amounts, Fraction(0)),), quantities[0].unit)


def _quantity(match: re.Match[str]) -> Fraction | None:
    digits = (match["digits"] or "0").replace(" ", "")
    decimals, power = (match["decimals"] or "").removesuffix("."), match["power"] or ""
    below = int(match["below"] or 1)
    if below == 0 or (match["decimals"] == "." and not match["digits"]):
        return None
    value = Fraction(f"{digits}{decimals}{power}")
    if match["mixed"]:
        above = int(match["mixed"])
        if decimals or power or not 0 < above < below or " " in (match["digits"] or ""):
            return None
        value += Fraction(above, below)
    else:
        value /= below
    signs = (match["sign"], match["inner_sign"] or "")
    if all(signs):
        return None
    return -value if "-" in signs else value


def _with_unit(value: Fraction, suffix: str, currency: str | None) -> Number | None:
    """Return a number with the unit in the suffix; None if the suffix is not a unit."""
    scale = _SCALE.match(suffix)
    if scale is not None:
        value, suffix = value * SCALES[scale[1].lower()], suffix[scale.end() :]
    if currency is not None:
        name = unit_of(currency.strip()) or ""
        if suffix.strip().startswith(("per ", "/")):
            return Number((value,), unit_of(f"{name} {suffix.strip()}") or name)
        return Number((value,), name) if unit_of(suffix.removeprefix("-")) in ("", name) else None
    unit = UNITS_BY_LETTER[suffix[1]] if _CAPITAL.fullmatch(suffix) else _unit_in(suffix)
    if unit == "percent":
        return Number((value, value / 100), unit)
    return None if unit is None else Number((value,), unit, counted(suffix, unit))


def _unit_in(suffix: str) -> str | None:
    """Return the unit that directly follows a number; None if the text is not a unit."""
    suffix = suffix.rstrip(" .")
    if not suffix:
        return ""
    if _DEGREES.fullmatch(suffix):
        return "degree"
    if suffix[0] == "-":
        return unit_of(suffix[1:]) if re.match("-[a-z]{3}", suffix) else None
    if suffix[0] in " /\\%¤€£¥₹¢":
        return unit_of(suffix)
    word = re.match(r"[A-Za-z]*", suffix)
    unit = unit_of(suffix)
    return unit if unit and word is not None and len(word[0]) > 1 else None


def parse_formula(text: str) -> Number | Formula | None:
    """Parse an expression with an optional currency before it or unit after it."""
    if text.startswith(CURRENCY):
        amount = parse(text[1:])
        return None if amount is None else as_quantity(amount, unit_of(CURRENCY) or "")
    if _ORDINAL.match(text):
        return None
    ends = [match.start() for match in re.finditer(r"(?<=[\w)}\]!|]) (?=[A-Za-z/])|(?=%)", text)]
    for end in ends[-5:]:
        unit = _unit_in(text[end:])
        core = parse(text[:end]) if unit or (unit == "" and _NOUN.match(text, end)) else None
        is_letter = end == len(text) - 2 and core is not None and bool(core.variables())  # \pi r^2 h
        if core is not None and unit is not None and not is_letter:
            return as_quantity(core, unit)
    node = None if len(text) > 1 and not are_nouns([text]) else parse(text)
    return None if node is None else as_quantity(node)


def as_quantity(node: ExpressionNode, unit: str = "") -> Number | Formula:
    """Return an expression as a number if it is in final form, else as a formula."""
    if node.name == "product" and len(node.operands) == 2 and node.operands[1].name == "degree" and not unit:
        return as_quantity(node.operands[0], "degree")
    if _is_temperature(node) and not unit:
        return as_quantity(node.operands[0].operands[0], f"degree/{node.operands[1].value}")
    if not is_finished(node):
        return Formula(node, "" if unit == "radian" and node.has(("pi",)) else unit)
    try:
        value = evaluate.value_of(node)
    except evaluate.UndefinedError:
        return Formula(node, unit)
    if not isinstance(value, Fraction):
        return Formula(node, unit)
    return Number((value, value / 100) if unit == "percent" else (value,), unit)


def _is_temperature(node: ExpressionNode) -> bool:
    """Whether an expression is degrees of Celsius or Fahrenheit."""
    match node:
        case ExpressionNode("product", (ExpressionNode("product", (_, ExpressionNode("degree"))), scale)):
            return scale.name == "variable" and scale.value in ("C", "F")
    return False

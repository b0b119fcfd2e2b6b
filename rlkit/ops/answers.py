"""Extraction and comparison of final answers."""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from functools import lru_cache

from rlkit.errors import RlkitError

LONGEST = 500
"""The maximum number of characters of a final answer."""
DEEPEST = 40
"""The maximum depth of nested brackets."""

_NUMBER = re.compile(r"[-+]?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)?(?:\.[0-9]+)?(?:/[0-9]+)?%?")
_FIRST = re.compile(r" *([-+]? ?[$€£¥₹]? ?[-+]?\.?[0-9])")
_QUANTITY = re.compile(
    r"(?P<sign>[-+]?) ?[$€£¥₹]? ?(?P<inner>[-+]?)"
    r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?: [0-9]{3})+(?![0-9])|[0-9]*)(?P<decimals>\.[0-9]+)?"
    r"(?P<power>[eE][-+]?[0-9]{1,3}(?![0-9A-Za-z]))?(?P<mixed> [0-9]+(?= ?/ ?[0-9]))?(?: ?/ ?(?P<below>[0-9]+))?"
)
_AROUND = " *_\"'.,;:!?$"
"""What may stand around an answer; a point before a digit is part of the number."""
_TERM = re.compile(r"(.*[ (])?([A-Za-z]|pi) ?")
"""A variable or a constant, to which a number with a sign is added."""
_SCALES = {"k": 10**3, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALE = re.compile(r" ?(k|thousand|million|billion|trillion)\b")
_PERCENT = re.compile(r" ?(%|percent\b|per cent\b)")
_DEGREES = re.compile(r" ?(\^\{?\\circ\}?|°)")
_OTHER_NUMBER = re.compile(r" ?[.,;:&'] ?[$€£¥₹]?[0-9]|.*\b(or|and|to) [^0-9]{0,20}[0-9]| ?[xX]? [0-9]")
_REMARK = re.compile(r"[,;:.(\"'-] ?[A-Za-z(]|/ ?[A-Za-z]")
_VARIABLES = "xyzabnei"
_WORDS = re.compile(r"[A-Za-z]{3}|\b(or|to|is|no|in|of|an|at|it|so|we)\b")
_NO_SYMBOL = re.compile(r"[\x00-\x1f\x7f#?@\"\N{REPLACEMENT CHARACTER}]|\\[0-9]")
_NO_NUMBER = re.compile(r"[0-9][A-Za-z]+[0-9]")
_COMMAND = re.compile(r"\\[A-Za-z]+|\b(sin|cos|tan|cot|log|exp|max|min|sqrt|ln|pi)\b")
_WRAPPED = re.compile(r"\\(?:text|mathrm|textbf|mathbf|boldsymbol|mbox|operatorname)\s*\{([^{}]*)\}")
_SYNONYMS = (
    ("\\$", "$"), ("\\%", "%"), ("\N{MINUS SIGN}", "-"), ("\N{EN DASH}", "-"), ("\\approx", "="), ("≈", "="),
    ("~", " "),
)  # fmt: skip
_TOO_LARGE = re.compile(
    r"\^[^+\-*/=,]{0,40}\^|\^\s*[{(]*\s*-?[0-9]{5}|[0-9]{5}[)}\s]*!|!\s*!|[0-9]{401}|[eE]\+?[0-9]{4}"
)
"""Towers of powers, large powers and factorials, and very long numbers, whose evaluation may never end."""


class UngradableError(RlkitError):
    """A final answer is so large or so deep that comparing it might not end."""


def final_answer(text: str) -> tuple[str | None, bool]:
    """Find the final answer of a text, and whether it is a number or a formula that was marked as the answer."""
    if (marked := text.rfind("####")) >= 0:
        lines = [line.strip() for line in text[marked + 4 :].splitlines()]
        same_line = lines[0].strip("# ") if lines else ""
        if same_line and (_is_answer(same_line) or not any(lines[1:])):
            return same_line, _is_answer(same_line)
        following = next(filter(None, lines[1:]), "")
        return (following if _is_answer(following) else same_line or None), False
    if (boxed := _last_boxed(text)) is not None:
        return boxed.strip(), _is_answer(boxed)
    whole = text.strip()
    if "\n" not in whole and _is_formula(_plain(whole)):
        return whole, False
    numbers = [m for m in _NUMBER.findall(text) if any(c.isdigit() for c in m)]
    return (numbers[-1] if numbers else whole or None), False


def equal(given: str, expected: str) -> bool:
    """Whether two answers are the same number or the same formula.

    Units, currencies, emphasis and words beside a number do not matter; 50% is both 50 and 0.5.

    Raises:
        UngradableError: The given answer is too large to be compared.
    """
    found = equal_at_once(given, expected)
    if found is not None:
        return found
    given, expected = _plain(given), _plain(expected)
    _bound(given)
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the missing deadline
    # The worker's own deadline replaces math-verify's, which needs signals and hangs in threads.
    parsed = [parse(f"${x}$", parsing_timeout=None) for x in (expected, given)]
    return bool(verify(*parsed, timeout_seconds=None))


def equal_at_once(given: str, expected: str) -> bool | None:
    """Return the same where math-verify is not needed: numbers, words and equal texts; None for other formulae."""
    left, right = quantities(given), quantities(expected)
    if right and left is not None:
        return any(_close(a, b) for a in left for b in right)
    given, expected = _plain(given), _plain(expected)
    if given.casefold() == expected.casefold():
        return True
    if right and (_NO_NUMBER.search(given) or not _is_formula(given)):
        return False
    return None


def canonical(answer: str) -> str:
    """Return one form for all answers that are the same number, or formulae that differ in blanks and markup alone.

    Units, currencies and words beside a number are left out; a percentage stays one, and a long answer as it is.
    """
    if len(answer) > LONGEST:
        return answer
    found = quantities(answer)
    if not found:
        return "".join(_plain(answer).casefold().split())
    value, sign = found[0], "%" if len(found) > 1 else ""
    decimal = repr(float(value)) if abs(value) < 2**53 else ""
    whole = value.denominator == 1 or not decimal or Fraction(decimal) != value
    return f"{value if whole else decimal}{sign}"


def quantities(text: str) -> tuple[Fraction, ...] | None:
    """Return the number in an answer: two readings of a percentage, an empty tuple where there are several numbers.

    Return None for what is not a number, with or without units: a formula, or words.
    """
    return None if len(text) > LONGEST else _quantities(text)


@lru_cache(1024)  # the samples of a prompt have one reference, and often one answer
def _quantities(text: str) -> tuple[Fraction, ...] | None:
    text = re.split("(?<![<>!])=", _plain(text))[-1].strip()
    text = re.sub(r"(?<=[^ +\-*/^]) \([^()]*\)", "", text).strip()  # a remark
    if re.fullmatch(r"[(\[{][^()\[\]{},]*[)\]}]", text):
        text = text[1:-1].strip()
    first = _FIRST.search(text)
    if first is None or not re.fullmatch(r"([A-Za-z' ,.:]*[ :])?", text[: first.start(1)]):
        return None
    if first[1][0] in "+-" and _TERM.fullmatch(text[: first.start(1)]):
        return None
    found = _QUANTITY.match(text, first.start(1))
    assert found is not None  # it matches the empty text
    value = _value(found)
    rest = text[found.end() :]
    if value is None or _OTHER_NUMBER.match(rest):
        return ()
    if scale := _SCALE.match(rest):
        value, rest = value * _SCALES[scale[1]], rest[scale.end() :]
    percent = _PERCENT.match(rest)
    rest = rest[percent.end() :] if percent else _DEGREES.sub("", rest, count=1)
    if not _are_units(rest):
        return None
    return (value, value / 100) if percent else (value,)


def _are_units(rest: str) -> bool:
    """Whether what follows a number leaves it as it is: nothing, units, words; and no operator or variable."""
    words = rest.strip(" .$€£¥₹")
    if not words or _REMARK.match(words):
        return True
    variable = not rest.startswith(" ") and words[0] in _VARIABLES and not words[1:2].isalpha()
    return words[0].isalpha() and not variable


def _value(found: re.Match[str]) -> Fraction | None:
    """Return the value of a matched number; None if it is not one."""
    whole = re.sub("[, ]", "", found["whole"])
    decimals, power, below = found["decimals"] or "", found["power"] or "", int(found["below"] or 1)
    if not whole + decimals or len(found[0]) > LONGEST or below == 0:
        return None
    value = Fraction(f"{whole or 0}{decimals}{power}")
    value = value + Fraction(int(found["mixed"]), below) if found["mixed"] else value / below
    return -value if "-" in (found["sign"], found["inner"]) else value


def _close(given: Fraction, expected: Fraction) -> bool:
    """Whether two numbers are equal up to 1e-6 of the expected one, or of 1 where that is less: integers exactly."""
    if given.denominator == expected.denominator == 1:
        return given == expected
    tolerance = min(Fraction(1), abs(expected)) / 10**6
    return abs(given - expected) <= tolerance


def _plain(text: str) -> str:
    """Return an answer without markup."""
    text = text if (boxed := _last_boxed(text)) is None else boxed
    text = re.sub(r"<<[^<>]*>>|\\left(?![a-z])|\\right(?![a-z])|\\displaystyle|\\[()\[\],;:!]|\*\*|__|`", "", text)
    text = _WRAPPED.sub(r" \1 ", text)
    for written, meant in _SYNONYMS:
        text = text.replace(written, meant)
    joined = " ".join(text.split()).rstrip(_AROUND)
    inner = joined.lstrip(_AROUND)
    before = joined[: len(joined) - len(inner)]
    return f".{inner}" if before.endswith(".") and before.count(".") == 1 and inner[:1].isdigit() else inner


def _is_answer(text: str) -> bool:
    found = quantities(text)
    return bool(found) or (found is None and _is_formula(_plain(text)))


def _is_formula(text: str) -> bool:
    """Whether a text has no words, LaTeX's and functions' aside, and no characters that no formula has."""
    if _NO_SYMBOL.search(text) or sum(map(text.count, "([{")) != sum(map(text.count, ")]}")):
        return False
    symbols = _COMMAND.sub(" 1 ", text)
    return any(c.isalnum() for c in symbols) and not _WORDS.search(symbols)


def _bound(text: str) -> None:
    """Raise for a formula whose evaluation might not end."""
    depth = deepest = 0
    for character in text:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, depth)
    if len(text) > LONGEST or deepest > DEEPEST or _TOO_LARGE.search(text):
        raise UngradableError(f"the answer {text[:100]!r} is too large to be compared")


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for i in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : i]
    return None

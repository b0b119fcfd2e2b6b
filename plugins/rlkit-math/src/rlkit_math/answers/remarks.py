"""What is beside an answer: its reason, a row or a heading of values, its unit, another notation."""

from __future__ import annotations

import re
from collections.abc import Callable

from rlkit_math.answers.markup import without_markup
from rlkit_math.answers.prose import is_doubtful
from rlkit_math.answers.units import alternatives, unit_of
from rlkit_math.answers.values import Answer, Formula, Named, Number, Words

MAX_REASON = 500
"""Maximum number of characters of an answer with a reason."""
MAX_LIST = 1000
"""Maximum number of characters of a list of values in lines."""
Parser = Callable[[str], Answer | None]

_REASON = re.compile(r"(.*?[^,; ])[,;]? \(?(?:because|since(?! [12][0-9]{3}\b)) (.+)")
_RETRACTING = re.compile(rf"\b{alternatives('retracting')}\b|[?≠]", re.I)
_ROW = re.compile(
    rf"(?:\| ?)?[*_]*(?:(?:final|grand) )?{alternatives('result')}[ *_]*(?:\([a-z0-9_$ ]{{1,4}}\))?[ *_:]*"
    r"(?:\|[ -]*)?\|([^|]*)(?:\||$)",
    re.I,
)
"""A row of a table with the name of a result and its value."""
_ANY_ROW = re.compile(r"\|[^|]*\|.*\|")
_SENTENCE = re.compile(
    r"(?:so |thus |hence )?the ((?:[a-z]+ ){0,6}[a-z]+) (?:is|are|equals)(?: equal to)? ([^a-z\s].*)", re.I
)
_HEADING = re.compile(
    r"(?:(?:so|thus|therefore|hence),? )?(?:the )?(?:(?:final|possible|real|valid|integer|two|three) )*"
    r"(?:solutions|roots|zeros|answers|values)(?: (?:of|for|to) (?:\$?[a-z]\$?|the (?:equation|problem)))?(?: are)?:",
    re.I,
)
_BLOCK = re.compile(r"```[a-z]*\n([^`]*)```$")
_BULLET = re.compile(r"(?:[-*•]|[0-9]{1,2}[.)]) +(\S.*)")
_UNIT = re.compile(
    r"(?:[ $~]|\\[,;!]|\\\)|\\(?:text|mathrm) ?\{)+"
    r"(?!in\b)((?:(?:square|cubic) )?[A-Za-z]+(?:[²³]|\^\{?[23]\}?| squared| cubed)?(?:(?: per |/)[a-z]+)?)"
    r"[}$ ]*(?=[.,;:!?)\n]|$)"
)
_OTHER_NOTATION = re.compile(
    r"(?:\$|\\\))?(,? (?:or|which is) (?:(?:about|approximately|roughly) )?)\$?([^\s$,;()]+?)\$?"
    r"(?: (?:in decimal form|as a decimal|as a fraction))?(?=[.,;]?(?:\s|$))"
)


def without_reason(content: str, parse: Parser) -> str:
    """Return the content of a box without the reason after its answer, if the reason does not contradict it."""
    is_explained = len(content) <= MAX_REASON and ("because" in content or "since" in content)
    match = _REASON.fullmatch(without_markup(content)) if is_explained else None
    answer = None if match is None else parse(match[1])
    if match is None or answer is None or _RETRACTING.search(match[2]):
        return content
    result = parse(match[2].rstrip(" )").rpartition("=")[2]) if "=" in match[2] else answer
    value = answer.value if isinstance(answer, Named) else answer
    return match[1] if isinstance(answer, Words) or result in (answer, value) else content


def without_introduction(content: str, parse: Parser) -> str:
    """Return the value of a sentence in a box, such as `the maximum value is 5`; else the content."""
    match = _SENTENCE.fullmatch(without_markup(content)) if "he " in content and len(content) <= MAX_REASON else None
    if match is None or is_doubtful(match[1]) or not isinstance(parse(match[2]), Number | Formula):
        return content
    return match[2]


def result_in_row(text: str, parse: Parser) -> str | None:
    """Return the value of the row that ends a table: empty if its first cell names no result; None for no row."""
    line = text.rpartition("\n")[2].strip()
    row = _ROW.fullmatch(line) if "|" in line else None
    if row is not None and isinstance(parse(row[1].strip()), Number | Formula | Named):
        return row[1].strip()
    return "" if _ANY_ROW.fullmatch(line) else None


def in_code_block(text: str, parse: Parser) -> str:
    """Return the value in the block of code that ends a text; the text if there is none."""
    block = _BLOCK.search(text, max(0, len(text) - MAX_LIST)) if text.endswith("```") else None
    content = "" if block is None else " ".join(block[1].split())
    return content if not isinstance(parse(content), Words | None) else text


def listed_values(text: str, parse: Parser) -> str | None:
    """Return the values that the last lines list under a heading such as `The roots are:`; None if there are none."""
    values: list[str] = []
    for line in reversed(text[-MAX_LIST:].split("\n")):
        bullet = _BULLET.fullmatch(line.strip())
        if bullet is None and values and not line.strip():
            continue
        if bullet is None:
            is_list = len(values) > 1 and _HEADING.fullmatch(line.strip().replace("*", "")) is not None
            return ", ".join(reversed(values)) if is_list and not is_doubtful(line) else None
        answer = parse(bullet[1])
        if not isinstance(answer, Number | Formula | Named):
            return None
        values.append(bullet[1].rstrip(".,;"))
    return None


def unit_after_box(text: str, end: int) -> str:
    """Return the known unit that ends a clause after a box; empty if there is none."""
    match = _UNIT.match(text, end)
    return match[1] if match is not None and unit_of(without_markup(match[1])) else ""


def notation_after_box(text: str, end: int) -> tuple[str, int]:
    """Return the same value in another notation, as `or 12.5%` after a box, with its end; empty if there is none."""
    match = _OTHER_NOTATION.match(text, end)
    return ("", end) if match is None else (match[1] + match[2], match.end())

"""Remarks after an answer: a check of it, the question again, a comparison, or an offer to the user."""

# ruff: noqa: RUF001 (answers contain these characters)

from __future__ import annotations

import re
from collections.abc import Callable

from rlkit_math.answers.prose import is_doubtful
from rlkit_math.answers.units import alternatives
from rlkit_math.answers.values import Answer, Formula, Named, Number

MAX_REMARK = 600
"""Maximum number of characters of a remark."""
Parser = Callable[[str], Answer | None]

_QUESTION = re.compile(r"\((?:the|your) (?:original )?question (?:was|is|asks|asked)\b[^()]*\?\)", re.I)
_OFFER = re.compile(
    r"(?:\n|(?<=[.!?*$)]) )[^\w\n]{0,8}(?:(?:would you like|do you want)(?: me)? to|want me to"
    r"|shall I also|(?:please )?let me know if|feel free to|(?:I )?hope (?:this|that) helps"
    r"|if you (?:have|need) (?:any|more|further)|is there anything"
    r"|(?:I(?:'m| am) )?happy to help|I can also (?:explain|show|help|walk))\b[^\n]{0,300}$",
    re.I,
)
"""What the last line offers to the user or asks, after the answer."""
_RETURNING = re.compile(
    r"\b(?:but|wait|actually|instead|wrong|incorrect|mistake|error|meant?|different|not|should|or"
    r"|(?:be|is|was) \W*[0-9])\b|=",
    re.I,
)
"""What goes back to the answer, and not on to something else."""
_COMPARISON = re.compile(
    r"(?<=[\w*$]), (?:which is )?\$?[0-9][0-9.,]*(?: [a-z]+)? (?:less|more|fewer|higher|lower|shorter|longer) than"
    r" [^,;\n]{0,80}?[0-9][^,;\n]{0,80}$"
)
"""A comparison of the answer with another number: `, 2 less than his goal of 40`."""
_ASIDE = re.compile(r"\([^()?]{3,200}\)")
_EQUATION = re.compile(rf"[*_]{{0,2}}{alternatives('check')}\b[*_]{{0,2}} ?[:：][*_ ]*([^:]*?)[ ✓✔✅.]*", re.I)
"""A line that is an equation after a heading."""
_CHECK = re.compile(
    r"(?:\n|(?<=[.!]) )[^\w\n]{0,8}(?:(?:quick |as a )?" + alternatives("check") + r"(?:ing)?\b[*_]{0,2} ?[:：]"
    r"|(?:(?:let's|let us|let me|we can|I will|I'll|to) )?(?:double[- ]?|quickly |also )?(?:check|verify)(?:ing)?\b"
    r"|(?:indeed|and)?,? ?(?:this|that|it|which) (?:result |answer |value |also )?"
    r"(?:matches|agrees|satisfies|checks out|confirms|makes sense|is consistent|is (?:indeed )?correct)\b)",
    re.I,
)
"""The beginning of a check, at the start of a line or of a sentence."""
_EXPLANATION = re.compile(r" \(([0-9$][^()=<>≠?,\n]{0,20} (?:[×*+·÷−/-]|\\times|\\cdot) [^()=<>≠?,\n]{1,20})\)\.?$")
"""The calculation beside an answer: `$18 (9 eggs × $2)`."""
_CONCLUDING = re.compile(
    r"\b(?:but|not|wrong|incorrect|mistake|error|maybe|perhaps|possibly|probably|wait|oops|nope|actually|instead|however"
    r"|unless|otherwise|should|suppose|assume|fails?|contradict\w*|answer (?!is (?:correct|right|valid))|n't)\b|n't\b"
    r"|[?≠✗✘❌]|\\ne|\b(?:so|thus|hence|therefore|then)\b[^.\n]*[0-9]",
    re.I,
)
"""What takes the answer back, or draws another conclusion."""
_CHECKING = re.compile(
    r"=|[✓✔✅]|:\s*$|\b(?:correct|works?|match\w*|satisf\w+|holds?|true|consistent|verified|verif\w+|agrees?|expected"
    r"|required|check\w*|sense|reasonable|confirm\w*)\b",
    re.I,
)
_OPERANDS = r"(?:[-0-9.+−*/×·÷^()²³ ]|,(?=[0-9]{3}))*"
_CALCULATION = re.compile(rf"[-−(]*[0-9]{_OPERANDS}=(?:{_OPERANDS}=)*{_OPERANDS}[0-9)²³]")
_NUMBER = re.compile(r"[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")
_IN_BOLD = re.compile(r"[^*]*\*\*[^*0-9]*[0-9][^*]*\*\*[^*0-9]*")
"""A line with a number in bold and none after it."""


def without_remark(text: str, parse: Parser) -> str:
    """Return a text without a remark at its end; a check must be true. Empty if an offer has another value."""
    offer = _OFFER.search(text, max(0, len(text) - MAX_REMARK))
    if offer is not None and not _RETURNING.search(offer[0]):
        text = text[: offer.start()].rstrip()
    elif offer is not None and re.search("[0-9]", offer[0]):
        return ""
    comparison = _COMPARISON.search(text, max(0, len(text) - MAX_REMARK))
    text = text if comparison is None else text[: comparison.start()] + "."
    head, _, line = text.rpartition("\n")
    is_aside = _ASIDE.fullmatch(line) is not None and not is_doubtful(line[1:], in_words=True)
    if (is_aside and isinstance(parse(head.rstrip().rpartition("\n")[2]), Number)) or _QUESTION.fullmatch(line):
        return head.rstrip()
    check = _EQUATION.fullmatch(line) if len(line) <= MAX_REMARK else None
    if check is None or "=" not in check[1] or not isinstance(parse(check[1]), Number):
        return _without_check(_without_calculation(text, parse), parse)
    checked = head.rstrip().rpartition("\n")[2]
    is_answer = isinstance(parse(checked), Number | Formula | Named) or (
        _IN_BOLD.fullmatch(checked) is not None and not is_doubtful(checked, in_words=True)
    )
    return head.rstrip() if is_answer else _without_check(text, parse)


def _without_calculation(text: str, parse: Parser) -> str:
    """Return a text without the calculation in brackets that ends it, if it has the value of its sentence."""
    match = _EXPLANATION.search(text, max(0, len(text) - MAX_REMARK))
    numbers = [] if match is None else _NUMBER.findall(text[: match.start()].rpartition("\n")[2])
    calculation = "" if match is None else re.sub(r"[A-Za-z$€£]", "", match[1])
    is_true = any(isinstance(parse(f"{calculation} = {number}"), Number) for number in numbers[-1:])
    return text[: match.start()] + "." if match is not None and is_true else text


def _without_check(text: str, parse: Parser) -> str:
    """Return a text without the check that follows the sentence of its answer; the text if there is none."""
    start = max(0, len(text) - MAX_REMARK)
    for match in _CHECK.finditer(text, start):
        head, check = text[: match.start()].rstrip(), text[match.start() :].strip()
        answer = re.split(r"[.!?]\s+", head.rpartition("\n")[2])[-1]
        is_kept = is_doubtful(answer, in_words=True) and not is_doubtful(answer)  # in a way that only its words tell
        if _is_true(check, parse) and _has_number_of(answer, check) and not is_kept:
            return head
    return text


def _is_true(check: str, parse: Parser) -> bool:
    """Whether each line of a check says that something holds, and all of its calculations are true."""
    lines = [line for line in check.split("\n") if line.strip()]
    if _CONCLUDING.search(check) or not all(map(_CHECKING.search, lines)):
        return False
    return all(isinstance(parse(match[0]), Number) for match in _CALCULATION.finditer(check))


def _has_number_of(answer: str, check: str) -> bool:
    """Whether a sentence has a number, and a check with an equation has it as well."""
    numbers = {float(number.replace(",", "")) for number in _NUMBER.findall(answer)}
    checked = {float(number.replace(",", "")) for number in _NUMBER.findall(check)}
    return bool(numbers) and ("=" not in check or bool(numbers & checked) or check[-1] in "✓✔✅")

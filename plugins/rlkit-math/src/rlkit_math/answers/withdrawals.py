"""What takes an answer back: a retraction after it, or a later statement of another value."""

from __future__ import annotations

import re

from rlkit_math.answers.compare import same
from rlkit_math.answers.forms import parse_or_none
from rlkit_math.answers.nodes import UngradableError
from rlkit_math.answers.values import Answer, Formula, Number, Words

REASON = r"(?: \(|[,;:] )(?:the|this|since|because|note|check|after|using|see)\b"
"""What begins a reason after an answer, by its first word."""
_RETRACTION = re.compile(
    r"\b(?:no,? wait|wait,? no|scratch that)\b"
    r"|(?:^|[.!?\n])[\s$*)}]*(?:(?:but|oh|oops|sorry|hm+|actually|wait|no|hold on)[,.! ]+)*"
    r"(?:never ?mind(?=[.,!]|$)|I (?:don't|do not) know (?:which|whether|if)\b"
    r"|I made an? (?:[a-z]+ )?(?:mistake|error)"
    r"|(?:that|this|it) (?:isn't|wasn't) (?:right|correct)"
    r"|(?:that|this|it)(?:'s| is| was| seems| can't be| cannot be)"
    r" (?:wrong|incorrect|not (?:right|correct)|a mistake))",
    re.I,
)
"""What takes an answer back, not within a sentence about something else."""
_STATED_LATER = re.compile(
    r"\b(?:(?P<answer>answer (?:is|should be|must be|was)|(?:final|correct|corrected|right|actual) answer[*_]{0,2}:)"
    r"|should (?:actually |really |instead )?(?:be|have been))(?: (?:actually|really|instead|now|therefore|thus)\b)?"
    rf"[: *_]*(?=(?P<value>[^\n]{{1,80}}?)(?:[*_]{{0,2}}[.!?]?[*_]{{0,2}}$|[*_]{{0,2}}[.!?][*_]{{0,2}} |{REASON}))",
    re.I | re.M,
)
"""A value that the text after an answer states; one after `answer` outweighs one after `should be`."""


def is_withdrawn(marked: str, following: str) -> bool:
    """Whether what follows a marked answer states another, or takes it back without stating it again."""
    statements = list(_STATED_LATER.finditer(following))
    statements = [statement for statement in statements if statement["answer"]] or statements
    later, answer = (parse_or_none(text) for text in (statements[-1]["value"] if statements else "", marked))
    if later is None or answer is None or not _are_comparable(later, answer):
        return _RETRACTION.search(following) is not None
    try:
        return not same(answer, later)
    except UngradableError:
        return True


def _are_comparable(*answers: Answer) -> bool:
    """Whether answers are all words, or all values."""
    return all(isinstance(answer, Words) for answer in answers) or all(map(_is_value, answers))


def _is_value(answer: Answer) -> bool:
    """Whether an answer is a number, a formula, or the letter of a choice."""
    return isinstance(answer, Number | Formula) or (isinstance(answer, Words) and len(answer.text) == 1)

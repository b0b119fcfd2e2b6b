"""Answers that a sentence or a heading announces: `The answer is 5.`, `Lösung: 5`."""

# ruff: noqa: RUF001 (answers contain these characters)

from __future__ import annotations

import re

from rlkit_math.answers.forms import is_marked, parse_or_none
from rlkit_math.answers.prose import is_doubtful, with_decimal_points
from rlkit_math.answers.units import alternatives
from rlkit_math.answers.withdrawals import REASON, is_withdrawn

_ANNOUNCED = re.compile(
    r"(?:^|[.!?] |[。！？]|[;；】](?=\w{0,3}选))[^\w\n]{0,10}"
    r"(?:(?:(?:so|thus|therefore|hence)\b,? ?)?(?:the )?(?:final |correct |short )?answer"
    r"(?P<label>[*_]{0,2}(?: is\b:?| ?:|[ :]{0,3}\n\s{0,5}))|(?:(?:die|la|a) )?"
    r"(?:(?:richtige|endgültige|bonne|правильный) )?"
    rf"(?:{alternatives('answer')}|(?P<solution>{alternatives('solution')})(?=[^=\n]{{0,200}}$))"
    r"(?: (?:finale?|corr?ec?ta|correcte|corretta))?(?P<foreign> ?:| (?:lautet|ist|es|est|é|è|to)\b:?)"
    r"(?:(?: (?:la|a|el))?(?: (?:letra|lettera|option|opción|opção|вариант))?(?= \W{0,3}[A-H]\b))?"
    r"|(?:(?![不誤違错误오틀])[\u3040-\u30ff\u4e00-\u9fff，,、]){0,9}"
    r"(?:答案|选(?=\W*[A-H])|(?:正解|答え?|정답|답)(?=[はが은는：: ]*\W*[A-H](?![A-Za-z])|[：:]))"
    r"[是为はが은는】：: ]*(?:选项|選択肢)?)[*_ ]{0,5}(?P<answer>[^\n]{1,200}?)"
    rf"(?:です|である|입니다|이다)?(?:[.。]?[*_]{{0,2}}\.?$|[*_]{{0,2}}\.[*_]{{0,2}} |。|{REASON})",
    re.I | re.M,
)
"""An answer that the start of a sentence or a heading announces, up to the end of its sentence."""
_DOUBT = re.compile(r"(?:^|[\s.!?])(?:no[.,:!]|wait\b|oops\b|wrong\b|so it(?: i|')s\b)", re.I)
"""Words after an announced answer with which it is checked and found wrong."""


def announced_answer(text: str) -> str | None:
    """Return the last announced answer of a text; None if there is none, or what follows takes it back."""
    announcements = list(_ANNOUNCED.finditer(text))
    answers = [match for match in announcements if not match["solution"]]  # a solution may be the way to an answer
    match = next(iter((answers or announcements)[-1:]), None)
    if match is None or parse_or_none(match["answer"]) is None:
        return None
    following = text[match.end() :]
    if _DOUBT.search(following) or is_withdrawn(match["answer"], following):
        return None
    if match["foreign"]:
        sentence = text[match.start() : match.end("answer")]
        announced = with_decimal_points(sentence)[match.start("answer") - match.start() :]
        is_stated = is_marked(match["answer"]) or ":" in match["foreign"]
        return announced if is_stated and not is_doubtful(sentence) else None
    is_name = not match["answer"][0].islower() or text[match.start("answer") - 1] in "*_"
    is_stated = is_marked(match["answer"]) or is_name or not (match["label"] or "").endswith(" is")
    return match["answer"] if is_stated else None

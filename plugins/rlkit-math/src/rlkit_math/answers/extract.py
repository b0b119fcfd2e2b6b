"""Extraction of the final answer of a text: what is after a marker, what the end states, or the last number."""

# ruff: noqa: RUF001 (answers contain these characters)

from __future__ import annotations

import re
from typing import NamedTuple

from rlkit_math.answers import compare
from rlkit_math.answers.announcements import announced_answer
from rlkit_math.answers.checks import without_remark
from rlkit_math.answers.digits import RANKED
from rlkit_math.answers.forms import MAX_ITEMS, MAX_LENGTH, is_marked, parse_or_none
from rlkit_math.answers.json_objects import json_answer
from rlkit_math.answers.markup import without_markup, without_special_tokens
from rlkit_math.answers.phrases import ROUNDING
from rlkit_math.answers.prose import in_digits, is_doubtful
from rlkit_math.answers.remarks import (
    in_code_block,
    listed_values,
    notation_after_box,
    result_in_row,
    unit_after_box,
    without_introduction,
    without_reason,
)
from rlkit_math.answers.sentences import asked_by
from rlkit_math.answers.statements import END_OF_SENTENCE, is_contradicted, stated_in
from rlkit_math.answers.units import alternatives, changes_number, multiplies_number, unit_of
from rlkit_math.answers.values import Answer, Digits, Formula, Notations, Number, Words
from rlkit_math.answers.withdrawals import is_withdrawn

MARKER = "####"
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?: ?\{| (?=[0-9A-Za-z]))")
_NAME = r"([a-z])(?: ?_ ?(?:[0-9]|\{[0-9]\}))? ?= ?"
_BETWEEN_BOXES = re.compile(
    rf"[\s,;$*]*(?:or|and)?[\s,;$*]*|(?:[ $]*(?:[,;] ?(?:or|and)?|or|and)[ $]+|[ $]*[,;][ $]*){_NAME}"
)
"""What is between the boxes of a list, whose values may have one name: `x = \\boxed{5} or x = \\boxed{-2}`."""
_NAME_BEFORE = re.compile(rf"(?:^|[$,:;(]|[a-z,:;.] ){_NAME}$")
_OPEN = re.compile(r"(?:\*\*|\$|\\\(|\\\[|\\boxed ?\{|\\quad|\\[,;!]|\s)+$")
_CLOSE = re.compile(r"(?:\s*</\w+>|\}|\s*\*\*|\s*\$|\s*\\\)|\s*\\\])+")
_CHANGED_BEFORE = re.compile(
    r"(?:[-+/^_<>≠≤≥≈~±√¬!*|{]|(?:wrong|incorrect) answer (?:is|was|would be)"
    r"|not (?:sure|certain) (?:that |if |whether )?it is"
    r"|\b(?i:no|keine|falsche|wrong|incorrect|mauvaise|fausse|неверный|неправильный)"
    r" (?i:lösung|antwort|answer|solution|réponse|ответ) ?:[* ]*"
    rf"|(?<!\w)(?i:{alternatives('bounding')})(?: (?:die|den|der|das|les|los|las|os|as|le|i|gli|the))? ?"
    r"|(?:不|大约|[约約]|(?<![가-힣])약|だいたい|およそ|대략|거의|大于|小于|超过|至少|至多|少于|多于|高于|低于|最多|几乎|将近|接近|不到|而非"
    r"|少なくとも|多くとも|高々|ほぼ|ほとんど|적어도|최소|최대|或者?|または|又は|또는) ?[是为等于]*"
    r"|(?:错误?的?|誤|間違った)(?:答[案え]?|选项)[是为は】：: ]*|(?:오답|틀린 답)[은: ]*"
    r"|\\(?:neq?|geq?|leq?|approx|times|cdot|div|pm|neg|sqrt|frac|gt|lt|sim))$"
)
_CHANGED_AFTER = re.compile(
    r"\s*(?:\^(?! ?\{? ?\\circ)|[_!?/*+%{]|[.,]\d|[-=<>] ?[\d\\]|\d|\\(?:times|cdot|pi|pm|div|sqrt|frac|mod))"
    r"|,? (?:which|but that|and that) (?:is|was|seems) (?:wrong|incorrect|false|not )"
    r"|,? (?:would|must|has to) be (?:wrong|incorrect|false)"
    r"|,? is (?:an? (?:upper|lower) bound|too\b)"
    r"| (?:o|ou|oder|или|of|lub) (?:más|menos|mais|plus|moins|mehr|weniger|больше|меньше|более|менее|meer|więcej)\b"
    r"|[A-Za-z](?![A-Za-z])"
    r"|[ 个個개円元원명人]{0,3}(?:以[上下]|未満|より[大小多少]|では(?:な|あり)|じゃな|左右|くらい|ぐらい|ほど"
    r"|이[상하]|미만|초과|정도|아[니님닙])"
)
_QUOTED = re.compile(r"^(?:> ?(?=\*\*|[A-Za-z])|(?:=>|->|→|⇒) ?)", re.M)
"""Marks of a quotation or an arrow before a line."""
_ENDED = re.compile(r"[a-z)][.!?] +$")
_ASKED = re.compile(r"[^.!?\n]*\?")
_APPROXIMATED = re.compile(rf"(?<!\w){alternatives('approximating')} ?$", re.I)
_APPROXIMATION = re.compile(r"(?:[≈~]|\\approx|\b(?:about|approximately|roughly|around|nearly|almost))\s*\$?\s*$")
_BOUND = re.compile(
    r"\b(?:be|is) (?:no (?:greater|less|more|fewer|larger|smaller|higher|lower) than|at (?:least|most))\s*\$?\s*$"
)
_FORMULA = re.compile(r"\$[^$]*\$|\\[A-Za-z]+")
_SUFFIX = re.compile(
    r"\s*(?:\}|\$)?\s*(\\?%)|(_ ?(?:[0-9]{1,2}|\{(?:[^{}]|\{[^{}]*\})*\}))"
    r"|(?:[\s$~]|\\text ?\{)*([apAP]\.? ?[mM]\b\.?)\}?"
)
"""What follows a box and belongs to its content: a percent sign, a base, a half of the day."""
_RANK = re.compile(r"(?:the )?[0-9]+[\s^{]*(?:\\[a-z]+ ?\{ ?)?(?:st|nd|rd|th)[\s}]*")
_AM = r"[apAP]\.?[mM]\b\.?"
_LAST_NUMBER = re.compile(
    rf"(?<![0-9])[0-9]+(?:(?::[0-9]+)+(?: ?{_AM})?| ?{_AM}| o'clock\b|(?:st|nd|rd|th) {RANKED}\b)"
    r"|(?<![0-9A-Za-z.^_])(?:-(?=[$€£]?[0-9.]))?[$€£¥₹]?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3})(?![0-9])"
    r"|[0-9]+,[0-9]{1,2}(?= ?(?:€|[a-zA-Z]{1,3}\b))|[0-9]+(?: [0-9]+(?=/[0-9]))?)?(?:\.[0-9]+)?"
    r"(?:e-?[0-9]{1,3}(?![0-9A-Za-z]))?(?:/[0-9]+)?%?"
)
_TAG = re.compile(r"</?[A-Za-z]\w*>")
_CLAUSE = re.compile(
    r"[.!?=]|,(?= (?:the|so|we|it|then)\b)|\b(?:is|are|was|were|equals|wait|oops|sorry|but|so|thus|hence|therefore)\b",
    re.I,
)
_SENTENCE = re.compile(r"[.!?:]\s+|\$[^$]*[=<>][^$]*\$\s*,")
"""Ends of sentences and labels, and conditions such as `$x = 5$,`."""
_LABEL = re.compile(r"(?:([^\W\d_']+)|[^\s]) ?:[* ]*$")
_WORD = re.compile(r"[^\W\d_]+(?:'[A-Za-z]+)?")
_WORDS_AFTER = re.compile(r"[^\w\n.]*([A-Za-z']+)(?: (?:the |a )?([A-Za-z']+))?")
_OTHER_THAN = re.compile(r"[ ,(]+(?:and )?not [$\\(]*-?[0-9]")
"""What an answer is not: `\\boxed{8}, not 9`."""
_CHOSEN = re.compile(
    r"(?:(?:option|choice|answer|antwort) \W{0,4}([A-J])\W{0,4} (?:is|ist)"
    r" (?:the )?(?:correct|right|richtig)\b[^.]{0,20}"
    r"|^(?:(?:so|thus|therefore|hence),? )?(?:\W{0,4}(?-i:([A-J]))\W{0,4} is (?:the )?(?:correct|right|best)"
    r"(?: (?:answer|choice|option))?|(?:(?:the )?(?:correct )?(?:answer|choice|option) (?:must|should|has to) be"
    r"|(?:I|we)(?:'d| would|'ll)? (?:choose|select|pick|go with))"
    r" (?:(?:answer|option|choice) )?\W{0,4}(?-i:([A-J]))))\W*$",
    re.I,
)
_BOLD = re.compile(r".*\*\*([^*]+)\*\*(?:\W*|( [A-Za-z ]{1,40})[.!]?)$")
_SCIENTIFIC = re.compile(r"(?:\\times|\\cdot|[×*·]) ?10 ?\^|[0-9]e[-+]?[0-9]")
_ABOUT = re.compile(r"\b(?:about|approximately|roughly|around) (?=\$?[0-9])")
_EXPLAINED = re.compile(
    rf"([^\n]{{1,100}})\n\s*[*_#]{{0,4}} ?{alternatives('explanation')}[*_]{{0,2}} ?[:：?\n](?s:(.*))", re.I
)
"""A line that is followed by its explanation."""
_CONCLUDING = re.compile(r"=|\b(?:so|thus|hence|therefore|total|gives|makes)\b", re.I)
_RECONSIDERED = re.compile(
    r"\b(?:wait|oops|actually|correction|mistake|instead|maybe|perhaps|probably|should be)\b", re.I
)
_LIST_BEFORE = re.compile(
    rf"[0-9]\S* ?(?:,|or|and|to|of|in|-|:|/)\s*$|[0-9]\S* {alternatives('either')}\s*$"
    r"|\bone of\s*$|(?<![\w.])[0-9][0-9.,]*\s*$"
)
_DIVISION = re.compile(r"\b(?:divid|multiply)ing\b[^,.;:]* by \$?-?[0-9]+\$?, ?$", re.I)
_ADJACENT = re.compile(r"[^\W\d_]+|[\W_](?=\d)|[_^!]")
_UNIT_AFTER = re.compile(r" (?!in\b)(?:(?:square|cubic) )?[A-Za-z]{2,}(?: per [a-z]+)?")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
"""Braces, and escapes, of which `\\{` is no brace."""
CONTEXT_LENGTH = 80
"""Number of characters beside a number or a box that may change its meaning."""


class FinalAnswer(NamedTuple):
    """The text of the final answer, or None, and whether it is a marked number or formula."""

    text: str | None
    marked: bool


def final_answer(text: str, expected: str = "") -> FinalAnswer:
    """Return the final answer of a text: after the last `####`, else in the last box, else what its end states.

    Words after the last `####` are a heading if a box follows: then the answer is in the box. Without a marker, a
    reference `expected` of words, or of values of several names, is looked for in this form.
    """
    _, marker, rest = without_special_tokens(text).rpartition(MARKER)
    answer = _after_marker(rest) if marker else None
    if answer is not None and answer.text and is_withdrawn(answer.text, rest.partition(answer.text)[2]):
        return FinalAnswer(None, False)
    if answer is not None and answer.marked:
        return answer
    boxes = list(_BOX.finditer(rest))
    if boxes:
        boxed = _boxed(rest, boxes)
        return FinalAnswer(boxed, is_marked(boxed))
    if answer is not None:
        return answer
    reference = parse_or_none(expected)
    text = _before_explanation(without_remark(_QUOTED.sub("", rest.strip()), parse_or_none), reference)
    if _SCIENTIFIC.search(expected):  # a value that is rounded itself
        text = _ABOUT.sub("", text)
    return FinalAnswer(asked_by(reference, text, parse_or_none) or _unmarked(text), False)


def marked_or_all(text: str) -> str:
    """Return the marked answer of a reference, else all of it; never an unmarked part."""
    return (final_answer(text).text or "") if MARKER in text or _BOX.search(text) else text.strip()


def _after_marker(text: str) -> FinalAnswer:
    lines = [line.strip() for line in text.split("\n")]
    same_line = lines[0].rstrip("# ") if lines else ""
    following = next(filter(None, lines[1:]), "")
    marked = is_marked(same_line)
    if marked or (same_line and not following):
        return FinalAnswer(same_line, marked)
    return FinalAnswer((following if parse_or_none(following) is not None else same_line) or None, False)


def _boxed(text: str, boxes: list[re.Match[str]]) -> str:
    """Return the content of the last box, or the contents of several adjacent boxes as a list."""
    last = boxes[-1]
    end = _end_of_box(text, last)
    if end is None:
        return text[last.start() :]
    if is_withdrawn(_content(text, last, end), text[end:]):
        return ""
    contents = [_content(text, last, end)]
    start, end_of_last = last.start(), end
    for box in reversed(boxes[-MAX_ITEMS:-1]):
        end = _end_of_box(text, box)
        if end is None or not _are_listed(text, box, end, start):
            break
        content = _content(text, box, end)
        start = box.start()
        contents = contents if content in contents else [content, *contents]
    notation, end_of_notation = notation_after_box(text, end_of_last)
    if notation and isinstance(parse_or_none(contents[-1] + notation), Notations | Number | Formula):
        contents[-1] += notation
        end_of_last = end_of_notation
    is_changed = _is_changed(text, start, end_of_last, boxed=True)
    return _line_of(text, start, end_of_last) if is_changed else ", ".join(contents)


def _are_listed(text: str, box: re.Match[str], end: int, start: int) -> bool:
    """Whether a box and the next one, which begins at `start`, are values of one list."""
    if not 0 <= start - end <= CONTEXT_LENGTH:
        return False
    between = _BETWEEN_BOXES.fullmatch(text, end, start)
    return between is not None and _has_name(text[: box.start()], between[1])


def _has_name(before: str, name: str | None) -> bool:
    """Whether a text ends with a name and an equals sign; true for no name."""
    match = None if name is None else _NAME_BEFORE.search(before[-CONTEXT_LENGTH:])
    return name is None or (match is not None and match[1] == name)


def _end_of_box(text: str, box: re.Match[str]) -> int | None:
    """Return the end of a box, including its brace; None if it is not closed."""
    if not box[0].endswith("{"):
        return box.end() + len(text[box.end() :].split(maxsplit=1)[0].rstrip("$.,"))
    depth = 1
    for bracket in _BRACES.finditer(text, box.end()):
        depth += (bracket[0] == "{") - (bracket[0] == "}")
        if depth == 0:
            return bracket.end()
    return None


def _content(text: str, box: re.Match[str], end: int) -> str:
    content = text[box.end() : end - box[0].endswith("{")].strip()
    suffix = _SUFFIX.match(text, end, end + CONTEXT_LENGTH)
    if suffix is None and _RANK.fullmatch(content):
        return f"{content} place"
    if suffix is None:
        unit = unit_after_box(text, end)
        answer = parse_or_none(content)
        is_bare = isinstance(answer, Number | Formula) and not answer.unit
        return f"{content} {unit}" if unit and is_bare else _without_sentence(content)
    return content + (suffix[2] or suffix[3] or "%")


def _without_sentence(content: str) -> str:
    return without_introduction(without_reason(content, parse_or_none), parse_or_none)


def _is_changed(text: str, start: int, end: int, boxed: bool = False) -> bool:
    """Whether a sign, an operator or a word beside a span changes its meaning; a box may be an approximation."""
    line_before = text[max(text.rfind("\n", 0, start) + 1, start - CONTEXT_LENGTH) : start]
    before = _OPEN.sub("", ROUNDING.sub("", _TAG.split(line_before)[-1]))
    before = "" if _ENDED.search(line_before) else before
    before = _BOUND.sub("", _APPROXIMATION.sub("", before)) if boxed else before
    bullet = before in ("-", "+", "*") and line_before.startswith(f"{before} ")
    clause = _OPEN.sub("", _SENTENCE.split(line_before)[-1])
    listed = _LIST_BEFORE.search(clause) and not (boxed and _DIVISION.search(clause))
    is_approximated = not boxed and _APPROXIMATED.search(before)
    if (_CHANGED_BEFORE.search(before) and not bullet) or listed or is_approximated:
        return True
    label = _LABEL.search(before)
    clause = _FORMULA.sub(" ", _CLAUSE.split(before)[-1])
    words: list[str | None] = [label[1]] if label is not None else _WORD.findall(clause)[-3:]
    if boxed:  # `on or off, giving \\boxed{4}`, but not `3 or \\boxed{4}`
        words = [word for word in words[:-1] if word != "or"] + words[-1:]
    after = text[end : end + CONTEXT_LENGTH]
    suffix = _SUFFIX.match(after) if text[end - 1] == "}" else None
    close = _CLOSE.match(after, suffix.end() if suffix else 0)
    after = after[close.end() if close else suffix.end() if suffix else 0 :]
    is_closed = close is not None and close[0].strip("} ") != ""
    if (_CHANGED_AFTER.match(after) and not is_closed) or (not boxed and _ASKED.match(after)):
        return True
    following = _WORDS_AFTER.match(after)
    if following and not _OTHER_THAN.match(after):
        words.extend(following.groups())
    multiplied = following is not None and multiplies_number(following[1])
    return multiplied or any(changes_number(name, hedged=not boxed) for name in words if name)


def _line_of(text: str, start: int, end: int) -> str:
    following = text.find("\n", end)
    return text[text.rfind("\n", 0, start) + 1 : len(text) if following < 0 else following].strip()


def _before_explanation(text: str, expected: Answer | None) -> str:
    """Return the answer in the first line of a text that explains it; empty if the explanation has another value.

    Words in the first line may be a heading; they are an answer if they are the reference.
    """
    match = _EXPLAINED.match(text)
    answer = None if match is None else parse_or_none(match[1])
    if match is None or answer is None or _RECONSIDERED.search(match[2]) or is_withdrawn(match[1], match[2]):
        return text
    if not is_marked(match[1]) and answer != expected:
        return text
    explanation = match[2].strip()
    is_concluding = _CONCLUDING.search(END_OF_SENTENCE.split(explanation)[-1]) is not None
    concluded = parse_or_none(_unmarked(explanation) or "") if is_concluding else None
    is_another = isinstance(concluded, Number) and isinstance(answer, Number) and not compare.same(concluded, answer)
    return "" if is_another else match[1]


def _unmarked(text: str) -> str | None:
    """Return a text or its last line if that is an answer, else its last number unless its context changes it."""
    text = in_code_block(text, parse_or_none)
    json = json_answer(text)
    if json is not None:
        return None if is_withdrawn(json.text, json.following) else _unmarked(json.text)
    announced = announced_answer(text)
    for answer_at_end in (result_in_row, listed_values):
        announced = answer_at_end(text, parse_or_none) if announced is None else announced
    if not text or announced is not None:
        return announced or None
    line = _TAG.split(text.rpartition("\n")[2])[-1].strip()
    is_all = line == _TAG.sub("", text).strip()
    end_of_line = in_digits(line[-MAX_LENGTH:])
    text = text.removesuffix(line[-MAX_LENGTH:]) + end_of_line
    chosen, bold = _CHOSEN.search(end_of_line), _BOLD.match(end_of_line)
    if chosen is not None:
        return chosen[1] or chosen[2] or chosen[3]
    stated_in_bold = None if bold is None else _in_bold(bold[1], bold[2] or "")
    if bold is not None and stated_in_bold is not None:
        start = len(text) - len(end_of_line) + bold.start(1)
        return line if _is_changed(text, start, start + len(bold[1])) else stated_in_bold
    answer = parse_or_none(end_of_line) if len(line) <= MAX_LENGTH else None
    if answer is not None and (not isinstance(answer, Words) or (is_all and line == end_of_line)):
        return end_of_line
    stated = stated_in(end_of_line)
    if stated is not None:
        start = len(text) - len(end_of_line) + stated.start
        return line if _is_changed(text, start, start + (stated.length or len(stated.text))) else stated.text
    numbers = [match for match in _LAST_NUMBER.finditer(text) if any(map(str.isdigit, match[0]))]
    if not numbers:
        return text
    start, end = numbers[-1].span()
    unit = _ADJACENT.match(text, end)
    sentence = END_OF_SENTENCE.split(end_of_line)[-1]
    is_new = ":" not in numbers[-1][0] and re.search("[0-9] ?(?:(?:st|nd|rd|th) |[apAP])", numbers[-1][0]) is not None
    is_doubted = is_doubtful(sentence, in_words=True) or len(re.findall("[0-9]+", sentence)) > 1
    is_hedged = sentence.count(" if ") > 1 or (is_new and is_doubted) or is_contradicted(text[:start], numbers[-1][0])
    is_hedged |= re.search(":|clock", numbers[-1][0]) is not None and text[:start].endswith(("before ", "after "))
    if is_hedged or _is_changed(text, start, end) or (unit is not None and unit_of(without_markup(unit[0])) is None):
        return _line_of(text, start, end)
    words = _UNIT_AFTER.match(text, end)
    return numbers[-1][0] + (words[0] if words is not None and unit_of(words[0]) else "")


def _in_bold(bold: str, following: str) -> str | None:
    """Return a bold answer, a number with the unit or the base that follows; None if it is none of its sentence."""
    answer = parse_or_none(bold)
    if not following:
        return bold if answer is not None else None
    if isinstance(answer, Number) and answer.unit:
        return bold
    if isinstance(parse_or_none(bold + following), Number | Digits):
        return bold + following
    return bold if isinstance(answer, Number) and not following.startswith(" in ") else None

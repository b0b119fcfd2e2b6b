"""The forms of answers that are read: all of a text is in one of them, or it is no answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from rlkit.ops.answers import evaluate
from rlkit.ops.answers.expression import DEEPEST, FUNCTIONS, parse
from rlkit.ops.answers.markup import plain
from rlkit.ops.answers.nodes import Node, UngradableError
from rlkit.ops.answers.quantities import of_node, read_formula, read_number
from rlkit.ops.answers.units import are_nouns
from rlkit.ops.answers.values import (
    Answer,
    Digits,
    Formula,
    Group,
    Matrix,
    Named,
    Number,
    Relation,
    Several,
    Words,
)

LONGEST = 500
"""The maximum number of characters of a final answer."""
MOST = 40
"""The maximum number of items of a list, a set or a tuple."""

_LETTER = re.compile(r"\(?([A-Za-z])\)?")
_WORDS = re.compile(r"[A-Za-z][A-Za-z'-]*(?: [A-Za-z][A-Za-z'-]*){0,4}")
_SHAPE = re.compile(r"\\(overline|overrightarrow|triangle|angle) ?\{? ?([A-Z]{1,4}) ?\}?")
_ARTICLE = re.compile(r"(?:an?|the) ", re.I)
_TWO_LETTERS = frozenset({"no", "mr", "ms", "it", "he", "me", "up"})
_ORDINAL = re.compile(r"([0-9]+) ?\^?\{? ?(st|nd|rd|th) ?\}?", re.I)
_BASE = re.compile(r"([0-9A-Za-z]+)(?:_\{? ?\(?([0-9]{1,2})\)? ?\}?|(?: in)? base ([0-9]{1,2}))")
_COLONS = re.compile(r"([0-9]+)((?: ?: ?[0-9]+)+)(?: ?([ap])\.? ?m\.?)?", re.I)
_HOUR = re.compile(r"([0-9]{1,2}) ?([ap])\.? ?m\.?", re.I)
_RATIO = re.compile(r"([0-9]+) to ([0-9]+)")
_MATRIX = re.compile(r"[(\[]? ?\\begin ?\{([pb]?)matrix\}(.*)\\end ?\{\1matrix\} ?[)\]]?")
_SEPARATOR = re.compile(r",? ?\b(?:and|or)\b|[,;]")
_COMMAS = re.compile("[,;]")
_RELATION = re.compile(r"<=|>=|!=|=|<|>|\\le(?![A-Za-z])|\\ge(?![A-Za-z])|\\ne(?![A-Za-z])|\\in(?![A-Za-z])")
_SIGNS = {"\\le": "<=", "\\ge": ">=", "\\ne": "!="}
_TURNED = {">": "<", ">=": "<="}
_NAME = re.compile(
    r"[A-Za-z](?:_(?:\w|\{\w+\}))?'*(?: ?\([A-Za-z0-9, =<>+-]*\))?|[A-Z]{2,4}"
    r"|\\(?:alpha|beta|gamma|theta|lambda|phi|omega)"
    r"|m? ?\\angle ?[A-Z]{1,3}|\( ?[A-Za-z](?: ?, ?[A-Za-z])+ ?\)"
)
_LEAD = re.compile(
    r"(?:(?:so|thus|therefore|hence|then)\b,? )?(?:(?:the|my|our) )?(?:(?:final|correct) )?"
    r"(?:(?:answer|result|solution|total|sum|value|option|choice)(?: of [A-Za-z])?"
    r" ?(?:=|:|is equal to|equals|is|are) ?:? ?|(?:answer|option|choice) )",
    re.I,
)
_THUS = re.compile(r"(?:so|thus|therefore|hence)\b,? ", re.I)
_COUNTED = re.compile(r"((?:[A-Za-z]{2,} ){0,4}[A-Za-z]{2,}) ?[:=] ?")
_OPENING, _CLOSING = "([{", ")]}"


def read(text: str) -> Answer | None:
    """Return the answer that the complete text is; None if it is in no form that is read.

    Raises:
        UngradableError: It is too long, too deep or too large to be compared.
    """
    if len(text) > LONGEST:
        raise UngradableError(f"the answer {text[:100]!r} is longer than {LONGEST} characters")
    if text.count("(") + text.count("[") + text.count("{") > DEEPEST and _depth(text) > DEEPEST:
        raise UngradableError(f"the answer {text[:100]!r} is nested too deeply to be compared")
    return _read(text)


@lru_cache(2048)  # the samples of a prompt have one reference, and often one answer
def _read(text: str) -> Answer | None:
    simple = read_number(text)
    if simple is not None:
        return simple
    stripped = plain(text)
    if not stripped or not stripped.isprintable():
        return None
    return _statement(_without_lead(stripped))


def _without_lead(text: str) -> str:
    """Return an answer without `the answer is`, or the name of what was counted."""
    lead = _LEAD.match(text)
    text = text if lead is None else text[lead.end() :]
    counted = _COUNTED.match(text)
    if counted is not None and are_nouns(counted[1].split()):
        text = text[counted.end() :]
    thus = _THUS.match(text)
    return plain(text if thus is None else text[thus.end() :])


def _statement(text: str) -> Answer | None:
    """Return a list of items, or a single item."""
    text = text.strip()
    if re.search(r"[^\x20-\x7e¤€£¥₹¢¶]", text):
        return None
    items = list(_split(text, _SEPARATOR))
    if len(items) == 1:
        return _item(text)
    if len(items) > MOST:
        return None
    answers = [_item(item) for item in items]
    return _several(answers)


def _several(answers: list[Answer | None]) -> Several | None:
    flat: list[Answer] = []
    for answer in answers:
        if answer is None:
            return None
        flat.extend(answer.items if isinstance(answer, Several) else (answer,))
    if len({isinstance(answer, Words) for answer in flat}) > 1 and not all(map(_is_symbol, flat)):
        return None
    return Several(tuple(flat))


def _is_symbol(answer: Answer) -> bool:
    return not isinstance(answer, Words) or len(answer.text) == 1


def _item(text: str) -> Answer | None:
    """Return a union, an equation, an inequality or a value."""
    if not text:
        return None
    members = list(_split(text, re.compile(r"\\cup(?![A-Za-z])")))
    if len(members) > 1:
        return _several([_item(member) for member in members])
    signs = [_SIGNS.get(match[0], match[0]) for match in _separators(text, _RELATION)]
    sides = list(_split(text, _RELATION))
    if not signs:
        return _value(text)
    if set(signs) == {"="}:
        return _equation(sides)
    if signs == ["\\in"]:
        return _item(sides[1]) if _NAME.fullmatch(sides[0]) else None
    return _inequality(signs, sides)


def _equation(sides: list[str]) -> Answer | None:
    """Return the value that an equation names; the equation itself if it names none."""
    if not sides[0] and len(sides) == 2:
        return _value(sides[1])
    name = ""
    while len(sides) > 1 and _NAME.fullmatch(sides[0]):
        name, sides = "".join(sides[0].split()), sides[1:]
    answers = [_item(side) for side in sides]
    if any(answer is None for answer in answers):
        return None
    if len(answers) == 1:
        return _named(name, answers[0])
    if all(isinstance(answer, Number | Formula) and not _variables(answer) for answer in answers):
        return _named(name, answers[-1]) if _is_calculation(answers) else None
    if name:
        sides = [name, *sides]
    nodes = [parse(side) for side in sides]
    return Relation(("=",), (nodes[0], nodes[1])) if len(nodes) == 2 and nodes[0] and nodes[1] else None


def _named(name: str, value: Answer | None) -> Answer | None:
    if value is None or not name:
        return value
    if isinstance(value, Several):
        return Several(tuple(Named(name, item) for item in value.items))
    if isinstance(value, Named | Relation | Words):
        return None
    if name in _variables(value):
        assert isinstance(value, Formula)  # as nothing else has variables here
        return Relation(("=",), (Node("variable", value=name), value.node))
    return Named(name, value)


def _is_calculation(answers: list[Answer | None]) -> bool:
    """Whether all sides of a chain such as 40 + 32 = 72 have one value, the last one written out."""
    nodes = [answer.node for answer in answers[:-1] if isinstance(answer, Formula)]
    last = answers[-1]
    if len(nodes) < len(answers) - 1 or not isinstance(last, Number):
        return False
    try:
        return all(evaluate.same_value(evaluate.value_of(node), last.readings[0]) for node in nodes)
    except evaluate.UndefinedError:
        return False


def _inequality(signs: list[str], sides: list[str]) -> Answer | None:
    """Return an inequality from the smaller to the larger side, of a single variable as an interval."""
    if signs[0] in _TURNED:
        signs, sides = [_TURNED.get(sign, "") for sign in reversed(signs)], sides[::-1]
    nodes = [parse(side) for side in sides]
    if not set(signs) <= {"<", "<="} and signs != ["!="]:
        return None
    complete = [node for node in nodes if node is not None]
    if len(complete) < len(nodes) or len(nodes) > 3 or not any(node.variables() for node in complete):
        return None
    relation = Relation(tuple(signs), tuple(complete))
    return relation if signs == ["!="] else _interval(relation) or relation


def _interval(relation: Relation) -> Group | None:
    """Return the interval of an inequality between a variable and numbers; None if it is another one."""
    infinity = Node("variable", value="\\infty")
    sides, signs = list(relation.sides), list(relation.signs)
    if len(sides) == 2 and sides[0].name == "variable":
        sides, signs = [Node("negative", (infinity,)), *sides], ["<", *signs]
    elif len(sides) == 2:
        sides, signs = [*sides, infinity], [*signs, "<"]
    if sides[1].name != "variable" or (sides[0].variables() | sides[2].variables()) - {"\\infty"}:
        return None
    brackets = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
    return Group(brackets, (of_node(sides[0]), of_node(sides[2])))


def _value(text: str) -> Answer | None:
    """Return a group, a matrix, words, digits, a number or a formula."""
    text = text.strip()
    if not text:
        return None
    if "\\begin" in text and text[0] != "{":
        return _matrix(text)
    for special in (read_number, _words, _digits, _group):
        answer = special(text)
        if answer is not None:
            return answer
    if "\\pm" in text or "\\mp" in text:
        return _several([read_formula(text.replace("\\pm", a).replace("\\mp", b)) for a, b in ("+-", "-+")])
    return read_formula(text)


def _words(text: str) -> Words | None:
    letter = _LETTER.fullmatch(text)
    if letter is not None and text.count("(") == text.count(")"):
        return Words(letter[1])
    if letter is not None and text.endswith(")"):
        return Words(letter[1])
    shape = _SHAPE.fullmatch(text)
    if shape is not None:
        return Words(" ".join(shape.groups()))
    if not _WORDS.fullmatch(text) or len(text) > 60:
        return None
    runs = re.findall(r"[A-Za-z]+", text)
    if any((len(run) > 2 and run not in FUNCTIONS) or run.lower() in _TWO_LETTERS for run in runs):
        return Words(_ARTICLE.sub("", text))
    return None


def _digits(text: str) -> Digits | None:
    base = _BASE.fullmatch(text)
    if base is not None and any(map(str.isdigit, base[1])):
        return Digits("base", (base[1].upper().lstrip("0"), base[2] or base[3]))
    ordinal = _ORDINAL.fullmatch(text)
    if ordinal is not None:
        return Digits("ordinal", (ordinal[1], ordinal[2].lower()))
    colons = _COLONS.fullmatch(text)
    if colons is not None:
        parts = tuple(str(int(part)) for part in text[: colons.end(2)].split(":"))
        return Digits("colon", parts, (colons[3] or "").lower())
    hour = _HOUR.fullmatch(text)
    if hour is not None:
        return Digits("colon", (str(int(hour[1])), "0"), hour[2].lower())
    ratio = _RATIO.fullmatch(text)
    return None if ratio is None else Digits("colon", (ratio[1], ratio[2]))


def _group(text: str) -> Answer | None:
    """Return what is in brackets: a group if it is several items, else the item itself."""
    if text[0] not in _OPENING or text[-1] not in _CLOSING or _closing(text) != len(text) - 1:
        return None
    content = text[1:-1].strip()
    if text[0] == "{" and text[-1] == "}":
        inside = _statement(content) if content else Several(())
        return Group("{}", inside.items) if isinstance(inside, Several) else inside
    items = list(_split(content, _COMMAS))
    if len(items) == 1:
        closes = _CLOSING[_OPENING.index(text[0])] == text[-1]
        inside = _statement(content) if closes and content else None
        return None if isinstance(inside, Group) else inside
    answers = [_item(item) for item in items]
    if len(answers) > MOST or any(answer is None or isinstance(answer, Relation) for answer in answers):
        return None
    return Group(text[0] + text[-1], tuple(answer for answer in answers if answer is not None))


def _matrix(text: str) -> Matrix | None:
    match = _MATRIX.fullmatch(text)
    if match is None:
        return None
    lines = [line for line in match[2].split("¶") if line.strip()]
    rows = [[_value(cell.strip()) if cell.strip() else None for cell in line.split("&")] for line in lines]
    if not rows or len({len(row) for row in rows}) > 1:
        return None
    complete = [tuple(cell for cell in row if isinstance(cell, Number | Formula | Words)) for row in rows]
    return Matrix(tuple(complete)) if all(len(row) == len(rows[0]) for row in complete) else None


def _variables(answer: Answer | None) -> set[str]:
    return answer.node.variables() if isinstance(answer, Formula) else set()


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in _OPENING) - (character in _CLOSING)
        deepest = max(deepest, depth)
    return deepest


def _closing(text: str) -> int:
    """Return the position at which the first bracket is closed, by whichever bracket."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if depth == 0:
            return position
    return -1


def _separators(text: str, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
    """Yield the separators of a text that are outside of brackets."""
    depth = last = 0
    for match in pattern.finditer(text):
        between = text[last : match.start()]
        depth += sum(map(between.count, _OPENING)) - sum(map(between.count, _CLOSING))
        last = match.start()
        if depth == 0:
            yield match


def _split(text: str, pattern: re.Pattern[str]) -> Iterator[str]:
    start = 0
    for match in _separators(text, pattern):
        yield text[start : match.start()].strip()
        start = match.end()
    yield text[start:].strip()

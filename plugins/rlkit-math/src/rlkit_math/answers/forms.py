"""Parsing of answers: a complete text has one of several forms, or it is no answer."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, permutations, starmap
from typing import TypeGuard

from rlkit_math.answers import evaluate
from rlkit_math.answers.brackets import CLOSING, OPENING, closing, depth_of, separators, split
from rlkit_math.answers.conditions import split_condition
from rlkit_math.answers.digits import parse_date, parse_digits, parse_residues
from rlkit_math.answers.expression import MAX_DEPTH, parse
from rlkit_math.answers.intervals import intersection, parse_inequality, reals_without
from rlkit_math.answers.markup import without_markup
from rlkit_math.answers.matrices import matrix_of, parse_matrix
from rlkit_math.answers.names import NAME, plain_name
from rlkit_math.answers.nodes import ExpressionNode, UngradableError
from rlkit_math.answers.notations import in_two_notations, number_value, value_of_chain, without_rejected
from rlkit_math.answers.phrases import THUS, without_phrases
from rlkit_math.answers.quantities import parse_compound, parse_decimal_comma, parse_formula, parse_number
from rlkit_math.answers.values import (
    Answer,
    BracketedItems,
    Formula,
    Named,
    Notations,
    Number,
    Relation,
    UnorderedItems,
    Words,
    node_of,
)
from rlkit_math.answers.words import parse_number_in_words, parse_words

MAX_LENGTH = 500
"""Maximum number of characters of a final answer."""
MAX_ITEMS = 40
"""Maximum number of items of a list, a set or a tuple."""

_NO_SOLUTION = re.compile(
    r"(?:the )?(?:empty|null) set|"
    r"(?:(?:the|this|our) (?:given )?(?:equation|system|inequality)(?: of equations)? has "
    r"|there(?: (?:is|are|exists?)|'s) )?"
    r"no (?:real |such |integer |valid |possible )?(?:(?:solution|root|value|number)s?|(?<=such )(?:triangle|[a-z]))"
    r"(?: exists?)?",
    re.I,
)
MAX_PERMUTED = 4
"""Maximum number of items of a tuple whose permutations are answers, too."""
_PERMUTED = re.compile(
    r"(\(.*\)),? ?(?:and|with|or) (?:all )?(?:of )?(?:(?:its|their|the|any) )?permutations?(?: thereof)?"
)
_CHOICE = re.compile(r"\(?([A-H](?=[).])|[B-H](?=:))[).:] (.+)")
"""A choice with its text; `A: 12` is an answer as well."""
_ROUNDED = re.compile(r"(?:(.*[^ ]) ?)?\\approx ?((-?[0-9]*\.([0-9]+)).*)")
_CASES = re.compile(r"(?:([^&]*) ?= ?)?(?:\{ ?)?\\begin ?\{(cases|array)\}(?: ?\{[clr| ]*\})?([^&]*&.*)\\end ?\{\2\}")
_IF = re.compile(r"^(?:if|when|for|where) |(?<=\b[a-z]) is(?: an)?(?= )|(?:(?<=odd)|(?<=even)) integers?$")
_PARITY = re.compile(r"^(odd|even) ([a-z])$")
_MIXED = re.compile(r"(-?¤?[0-9]+) and (?=[0-9]+ ?/ ?[0-9]|\\frac)")
_DECIMAL_COMMA = re.compile("-?[0-9]+,[0-9]+")
_CONDITION = re.compile(r"[a-z](?: ?\\in ?\\R)? ?(?:\||:|\\mid(?![A-Za-z])) ?")
"""What is before the condition of a set: `x \\mid`."""
_OF_REALS = re.compile(
    r"([a-z]) ?\\in ?\\R ?(?:,|:|\||\\mid(?![a-z])|and|with|where|such that) ?(?=.*\1.*[<>\\]|.*[<>\\].*\1)"
)
_SUCH_THAT = re.compile(r"\||:|\\mid(?![A-Za-z])")
_SEPARATOR = re.compile(r",? ?\b(?:and|or)\b|[,;]")
_COMMAS = re.compile("[,;]")
_TO = re.compile(r":| to (?=\S)")
_RELATION = re.compile(
    r"<=|>=|!=|=|<|>|\\le(?![A-Za-z])|\\ge(?![A-Za-z])|\\ne(?![A-Za-z])|\\in(?![A-Za-z])|\\equiv(?![A-Za-z])"
)
_POINT = re.compile(r"^[ABD-Z](?= ?\([^()]*,)")
_TRANSPOSED = re.compile(r"^[(\[](.*)[)\]] ?\^ ?(?:\{ ?T ?\}|T)$")
_SIGNS = {"\\le": "<=", "\\ge": ">=", "\\ne": "!=", "\\equiv": "="}
_INEQUALITY = re.compile(r"[<>]|!=|\\(?:[lgn]e)(?![a-z])")
_EXCLUDED = re.compile(r"[a-z] ?(?:\\ne|!=) ?")
_LONE_LETTER = re.compile(r"(?<![\\A-Za-z])[a-z](?![A-Za-z])")
_ALL_REALS = re.compile(
    r"(?:the set of )?(?:all|every|any) (?:the )?real(?:s| numbers?| [a-z]| values of [a-z])|\\R", re.I
)
_POSITIVE = re.compile(
    r"(?:all )?(?:non-?negative|positive|(negative)) real(?:s| numbers?)|\\R ?[_^] ?(?:\{ ?(?:\+|> ?0) ?\}|\+)", re.I
)
_REALS_WITHOUT = re.compile(
    r"(?:(?:the set of )?all real(?:s| numbers| values)(?: of)?(?: [a-z])?|\\R|\(-\\infty ?, ?\+?\\infty ?\)) ?"
    r"(?:(?:\\setminus|\\backslash|-) ?\{(.*)\}|(?:except|besides|excluding|other than) (?:for )?(?:[a-z] ?= ?)?(.*))"
)


@lru_cache(2048)  # the samples of a prompt have one reference, and often one answer
def parse_answer(text: str) -> Answer | None:
    """Return the complete text as an answer; None if it has no supported form.

    Raises:
        UngradableError: The text is too long, nested too deeply or too large to be compared.
    """
    if len(text) > MAX_LENGTH:
        raise UngradableError(f"the answer {text[:100]!r} is longer than {MAX_LENGTH} characters")
    if text.count("(") + text.count("[") + text.count("{") > MAX_DEPTH and depth_of(text) > MAX_DEPTH:
        raise UngradableError(f"the answer {text[:100]!r} is nested too deeply to be compared")
    number = parse_number(text)
    if number is not None:
        return number
    stripped = without_markup(text)
    if not stripped or not stripped.isprintable():
        return None
    return _conditional(without_phrases(stripped))


def is_marked(text: str) -> bool:
    """Whether a text is a number or a formula, which earns the credit for the format."""
    answer = parse_or_none(text)
    return answer is not None and not (isinstance(answer, Words) and len(answer.text) > 1)


def parse_or_none(text: str) -> Answer | None:
    """Return a text as an answer; None also if it is too long or too large to be compared."""
    try:
        return parse_answer(text) if len(text) <= MAX_LENGTH else None
    except UngradableError:
        return None


def _conditional(text: str) -> Answer | None:
    """Parse an answer with conditions after it; those that hold for every real value are left out."""
    text = _OF_REALS.sub("", text)
    core, condition = split_condition(text)
    if condition is None:
        return _statement(text)
    value = _conditional(core)
    if value is None or not condition.domain:
        return value
    items = value.items if isinstance(value, UnorderedItems) else (value,)
    is_restricted = isinstance(items[0] if items else None, Formula | Named) and condition.letters[0] in core
    return UnorderedItems((*items, Words(condition.domain))) if is_restricted else _statement(text)


def _statement(text: str) -> Answer | None:
    """Parse a list of items, or a single item."""
    text = text.strip()
    if re.search(r"[^\x20-\x7e¤€£¥₹¢¶]", text):
        return parse_words(text)
    cases = _CASES.fullmatch(text)
    if cases is not None and (pieces := _piecewise(cases[3])) is not None:
        return _named(plain_name(cases[1] or ""), pieces)
    complete: Answer | None = (
        parse_number_in_words(text) or parse_date(text) or parse_compound(text) or parse_residues(text)
    )
    complete = complete or parse_decimal_comma(text) or in_two_notations(text, _item) or without_rejected(text, _item)
    if complete is not None:
        return complete
    permuted = _PERMUTED.fullmatch(text)
    if permuted is not None:
        return _permutations(_bracketed(permuted[1]))
    choice = _CHOICE.fullmatch(text)
    value = None if choice is None else _statement(choice[2])
    if choice is not None and value is not None and not _is_letter(value):
        return Named(f"({choice[1]})", value)
    items = list(split(text, _SEPARATOR))
    if len(items) == 1:
        return _item(text)
    if len(items) > MAX_ITEMS or any(map(THUS.match, items[1:])):
        return None
    if "..." in items[1:]:
        return _progression(items)
    joints = [separator[0] for separator in separators(text, _SEPARATOR)]
    excluded = _EXCLUDED.match(text)
    if excluded is not None:
        items[1:] = [item if _EXCLUDED.match(item) else excluded[0] + item for item in items[1:]]
    answers, either = [_item(item) for item in items], any("or" in joint for joint in joints)
    if not either and all(map(_INEQUALITY.search, items)) and len(set(_LONE_LETTER.findall(text))) == 1:
        shared = intersection(answers)
        if shared is not None or any("and" in joint for joint in joints):
            return shared
    answer = _unordered(answers, either)
    if answer is not None and _DECIMAL_COMMA.fullmatch(text):
        return replace(answer, decimal=parse_number(text.replace(",", ".")))
    return answer if answer is None or not _MIXED.match(text) else replace(answer, mixed=_mixed(text))


def _permutations(answer: Answer | None) -> UnorderedItems | None:
    """Return all orders of a tuple; None for other answers."""
    if not isinstance(answer, BracketedItems) or answer.brackets != "()" or len(answer.items) > MAX_PERMUTED:
        return None
    return UnorderedItems(tuple(BracketedItems("()", items) for items in dict.fromkeys(permutations(answer.items))))


def _progression(items: list[str]) -> BracketedItems | None:
    """Parse a list with an ellipsis; of equidistant numbers before it, the first two count."""
    end = items.index("...")
    answers = [_item(item) for item in items if item != "..."]
    numbers = [answer.readings[0] for answer in answers[:end] if isinstance(answer, Number)]
    if len(numbers) == end and len({after - before for before, after in pairwise(numbers)}) == 1:
        del answers[2:end]
    complete = [answer for answer in answers if answer is not None]
    return BracketedItems("...", tuple(complete)) if len(complete) == len(answers) else None


def _mixed(text: str) -> Number | None:
    """Return the number of `5 and 1/2`; None for other lists."""
    answer = _item(_MIXED.sub(r"\1 ", text, count=1))
    return answer if isinstance(answer, Number) else None


def _unordered(answers: list[Answer | None], either: bool = False) -> UnorderedItems | None:
    flat: list[Answer] = []
    for answer in answers:
        if answer is None:
            return None
        flat.extend(answer.items if isinstance(answer, UnorderedItems) else (answer,))
    if len({isinstance(answer, Words) for answer in flat}) > 1 and not all(map(_is_symbol, flat)):
        return None
    names = {answer.name.partition("_")[0] for answer in flat if isinstance(answer, Named)}
    return UnorderedItems(tuple(flat), either and (len(names) > 1 or any(isinstance(answer, Words) for answer in flat)))


def _is_symbol(answer: Answer) -> bool:
    return not isinstance(answer, Words) or _is_letter(answer)


def _is_letter(answer: Answer | None) -> TypeGuard[Words]:
    return isinstance(answer, Words) and len(answer.text) == 1


def _item(text: str) -> Answer | None:
    """Parse a union, an equation, an inequality or a value."""
    if not text:
        return None
    members = list(split(text, re.compile(r"\\cup(?![A-Za-z])")))
    if len(members) > 1:
        return _unordered([_item(member) for member in members])
    residues = parse_residues(text)
    if residues is not None:
        return residues
    reals = _REALS_WITHOUT.fullmatch(text)
    if reals is not None:
        return reals_without([parse(number) for number in split(reals[1] or reals[2], _SEPARATOR) if number])
    signs = [_SIGNS.get(match[0], match[0]) for match in separators(text, _RELATION)]
    sides = list(split(text, _RELATION))
    if not signs:
        return _value(text)
    if set(signs) == {"="} and (sides[0] or "\\equiv" not in text):
        return _equation(sides)
    if signs == ["\\in"]:
        return _item(sides[1]) if NAME.fullmatch(sides[0]) else None
    return parse_inequality(signs, sides)


def _equation(sides: list[str]) -> Answer | None:
    """Parse an equation: return the value that it names, or the equation if it names none."""
    if not sides[0] and len(sides) == 2:
        return _value(sides[1])
    names = []
    while len(sides) > 1 and NAME.fullmatch(sides[0]):
        names.append(plain_name(sides[0]))
        sides = sides[1:]
    if len(sides) > 1 and "..." in sides[0]:  # 1 + 2 + ... + n = n(n + 1)/2
        sides = sides[1:]
    is_chain = len(sides) > 2 and not sides[0].startswith("not ")
    if is_chain and len(_variables(_item(sides[0]))) > 1:  # m + n = 64 + 9 = 73
        sides = sides[1:]
    name = names[-1] if names else ""
    answers = [_item(side) for side in sides]
    if any(answer is None for answer in answers):
        return None
    if len(answers) == 1:
        if len(names) > 1 and all(len(name) == 1 for name in names) and isinstance(answers[0], Number | Formula):
            return UnorderedItems(tuple(Named(name, answers[0]) for name in names))
        return None if len(names) > 1 and _is_letter(answers[0]) else _named(name, answers[0])
    if all(isinstance(answer, Number | Formula) and not _variables(answer) for answer in answers):
        chain = value_of_chain(answers)
        items = chain.items if isinstance(chain, Notations) else (chain,)
        named = [answer for answer in (_named(name, items[0]), *items[1:]) if answer is not None]
        return Notations(tuple(named)) if len(named) > 1 else _named(name, chain)
    nodes = [node_of(answer) for answer in answers if isinstance(answer, Number | Formula)]
    if name and len(nodes) == len(answers):  # P(x) = (x - 1)^2 = x^2 - 2x + 1
        return _named(name, answers[-1]) if all(starmap(evaluate.same, pairwise(nodes))) else None
    if name:
        sides = [name, *sides]
    parsed = [parse(side) for side in sides]
    if (
        not name and not is_chain and len(nodes) == len(answers) == 2 and evaluate.same(*nodes)
    ):  # an expression and its factors
        return answers[-1]
    return Relation(("=",), (parsed[0], parsed[1])) if len(parsed) == 2 and parsed[0] and parsed[1] else None


def _named(name: str, value: Answer | None) -> Answer | None:
    if value is None or not name or name.startswith(("\\sum", "\\prod", "\\int", "\\lim")):
        return value
    if isinstance(value, UnorderedItems):
        return UnorderedItems(tuple(Named(name, item) for item in value.items))
    if _is_letter(value):
        value = Formula(ExpressionNode("variable", value=value.text))
    if isinstance(value, Named | Relation | Words):
        return None
    if name in _variables(value):
        assert isinstance(value, Formula)  # no other value here has variables
        return Relation(("=",), (ExpressionNode("variable", value=name), value.node))
    return Named(name, value)


def _value(text: str) -> Answer | None:
    """Parse bracketed items, a matrix, words, digits, a number or a formula."""
    text = text.strip()
    if not text:
        return None
    positive = _POSITIVE.fullmatch(text)
    if positive is not None:
        sign = "<" if positive[1] else ">="[: 1 + text.lower().startswith(("non", "all non"))]
        return parse_inequality([sign], ["x", "0"])
    if _ALL_REALS.fullmatch(text):
        return reals_without([])
    if text == "\\emptyset" or _NO_SOLUTION.fullmatch(text):
        return BracketedItems("{}", ())
    if "\\begin" in text and text[0] != "{":
        return parse_matrix(text, _value)
    rounded = _ROUNDED.fullmatch(text)
    if rounded is not None:
        return _exact(rounded)
    for parse_form in (parse_number, parse_words, parse_digits, _bracketed, _ratio):
        answer = parse_form(text)
        if answer is not None:
            return answer
    if "\\pm" in text or "\\mp" in text:
        return _unordered([parse_formula(text.replace("\\pm", a).replace("\\mp", b)) for a, b in ("+-", "-+")])
    return parse_formula(text)


def _ratio(text: str) -> BracketedItems | None:
    """Parse a ratio of numbers such as `2:\\sqrt3`: its other terms, divided by the last term."""
    parts = list(split(text, _TO))
    if len(parts) < 2 or _LONE_LETTER.search(text):
        return None
    terms = [term for term in map(parse, parts) if term is not None and not term.variables()]
    quotients = (Formula(ExpressionNode("ratio", (term, terms[-1]))) for term in terms[:-1])
    return BracketedItems(":", tuple(quotients)) if len(terms) == len(parts) else None


def _piecewise(content: str) -> BracketedItems | None:
    """Parse rows of values with conditions; None if a row has no condition."""
    pieces: list[Answer] = []
    for row in filter(str.strip, content.split("¶")):
        value, _, condition = row.partition("&")
        condition = _PARITY.sub(r"\2 \1", _IF.sub("", condition.strip(" ,.")))
        answer, case = _statement(value.strip(" ,")), _statement(condition)
        if answer is None or not isinstance(case, BracketedItems | Relation | UnorderedItems | Named | Words):
            return None
        pieces.append(BracketedItems("if", (answer, case)))
    return BracketedItems("{}", tuple(pieces))


def _exact(rounded: re.Match[str]) -> Answer | None:
    """Return the exact value of `5/9 \\approx 0.556`, or the decimal after a name; None if it is not rounded to it."""
    approximation = _value(rounded[2])
    if not isinstance(approximation, Number):
        return None
    if not rounded[1] or NAME.fullmatch(rounded[1]):
        return _named((rounded[1] or "").replace(" ", ""), approximation)
    exact = _value(rounded[1])
    value = number_value(exact)
    if not isinstance(exact, Number | Formula) or value is None or value.imag:
        return None
    values = (value.real, 100 * value.real) if approximation.unit == "percent" else (value.real,)
    if all(abs(value - float(rounded[3])) > 0.501 * 10.0 ** -len(rounded[4]) for value in values):
        return None
    exact = replace(exact, unit=exact.unit or approximation.unit)
    return replace(exact, rounded=approximation) if isinstance(exact, Formula) else exact


def _bracketed(text: str) -> Answer | None:
    """Parse the content of brackets: several items as a collection, a single item as itself."""
    text = _TRANSPOSED.sub(r"(\1)", _POINT.sub("", text))
    if len(text) > 2 and (text[0] == "]" or text[-1] == "["):  # open ends in French
        text = text[0].replace("]", "(") + text[1:-1] + text[-1].replace("[", ")")
    if text[0] not in OPENING or text[-1] not in CLOSING or closing(text) != len(text) - 1:
        return None
    content = text[1:-1].strip()
    if text[0] == "{" and text[-1] == "}":
        members = list(split(content, _SUCH_THAT))
        if len(members) == 2 and not _CONDITION.match(content) and split_condition(content)[1] is None:
            described = [answer for answer in map(_statement, members) if answer is not None]
            return BracketedItems("{|}", tuple(described)) if len(described) == 2 else None
        condition = _CONDITION.match(content)
        content = content if condition is None else content[condition.end() :]
        answer = _conditional(content) if content else UnorderedItems(())
        if condition is not None and isinstance(answer, Number | Formula | Words):
            return None
        if isinstance(answer, UnorderedItems) and answer.items[-1:] == (Words("Z"),):
            return answer  # {x | x = k*pi, k in Z}
        if answer == BracketedItems("{}", ()):
            return BracketedItems("{}", (answer,))
        if isinstance(answer, UnorderedItems) and not answer.either:
            return BracketedItems("{}", tuple(dict.fromkeys(answer.items)))
        return answer
    items = list(split(content, _COMMAS))
    rows = [_bracketed(item) for item in items if text[0] == item[:1] == "["]
    if rows and all(isinstance(row, BracketedItems) and row.brackets == "[]" for row in rows):
        return matrix_of([list(row.items) for row in rows if isinstance(row, BracketedItems)])
    if len(items) == 1:
        matches = CLOSING[OPENING.index(text[0])] == text[-1]
        answer = _statement(content) if matches and content else None
        return None if isinstance(answer, BracketedItems) else answer
    answers = [_item(item) for item in items]
    if len(answers) > MAX_ITEMS or any(answer is None or isinstance(answer, Relation) for answer in answers):
        return None
    return BracketedItems(text[0] + text[-1], tuple(answer for answer in answers if answer is not None))


def _variables(answer: Answer | None) -> set[str]:
    return answer.node.variables() if isinstance(answer, Formula) else set()

"""Parsed answers: one class for each form."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from rlkit_math.answers.nodes import ExpressionNode


@dataclass(frozen=True)
class Number:
    """A number in final form with its unit; a percentage has two readings, 50 and 0.5."""

    readings: tuple[Fraction, ...]
    unit: str = ""
    noun: frozenset[str] = field(default=frozenset(), compare=False)
    """The words after it that are no known unit: they tell 2 red and 3 blue from 3 red and 2 blue."""


@dataclass(frozen=True)
class Formula:
    """An expression that is not a number in final form, with its unit."""

    node: ExpressionNode
    unit: str = ""
    rounded: Number | None = field(default=None, compare=False)
    """The decimal stated beside it: `4\\pi \\approx 12.57`."""


@dataclass(frozen=True)
class Words:
    """Words, or the letter of a choice."""

    text: str


@dataclass(frozen=True)
class Digits:
    """Digits that are not compared by value: a number in another base, a ratio, a time of day, a date."""

    kind: str
    numbers: tuple[str, ...]
    half: str = ""
    is_number: bool = field(default=False, compare=False)
    """Whether the first number stands for all: of the residue `4 (mod 9)`, of the rank `17th term`."""


@dataclass(frozen=True)
class BracketedItems:
    """A tuple, a point, an interval or a set: items in brackets."""

    brackets: str
    items: tuple[Answer, ...]


@dataclass(frozen=True)
class UnorderedItems:
    """Answers in any order: a list without brackets, a union."""

    items: tuple[Answer, ...]
    either: bool = False
    """Whether only one of the items is meant: words, or letters of choices, joined by `or`."""
    mixed: Number | None = None
    """The number that the text is as well: `5 and 1/2`."""
    decimal: Number | None = field(default=None, compare=False)
    """The number that a reference such as `3,5` may be as well, if its comma is a decimal one."""


@dataclass(frozen=True)
class MatrixRows:
    """A matrix as rows of expressions."""

    rows: tuple[tuple[Answer, ...], ...]
    is_product: bool = field(default=False, compare=False)
    """Whether it was multiplied by a number that stands before it: an answer, but no reference."""


@dataclass(frozen=True)
class Named:
    """A value with the name that an equation gives it."""

    name: str
    value: Answer


@dataclass(frozen=True)
class Relation:
    """Expressions separated by `=`, `<`, `<=` or `!=`; relations with `>` are reversed."""

    signs: tuple[str, ...]
    sides: tuple[ExpressionNode, ...]


@dataclass(frozen=True)
class Notations:
    """One value in two notations, such as `1/8, or 12.5%`: both must equal the other answer."""

    items: tuple[Answer, ...]


Answer = Number | Formula | Words | Digits | BracketedItems | UnorderedItems | MatrixRows | Named | Relation | Notations


def node_of(answer: Number | Formula) -> ExpressionNode:
    """Return the expression of a number or a formula."""
    return answer.node if isinstance(answer, Formula) else ExpressionNode("number", value=answer.readings[0])


_FORMS = {
    type(None): "in no form", Named: "equation", UnorderedItems: "list", MatrixRows: "matrix", Formula: "formula",
}  # fmt: skip


def form_of(answer: Answer | None) -> str:
    """Return the human-readable name of an answer's form."""
    match answer:
        case Number(readings, unit):
            return _form_of_number(readings[0], unit)
        case Notations(items):
            return form_of(items[0])
        case Relation(signs):
            return "equation" if signs == ("=",) else "inequality"
        case BracketedItems(":"):
            return "ratio"
        case BracketedItems(brackets):
            return "set" if brackets == "{}" else "tuple or interval"
        case Words(text):
            return "words" if len(text) > 1 else "letter"
        case Digits(kind):
            return {"base": "number in a base", "time": "time of day"}.get(kind, kind)
    return _FORMS[type(answer)]


def _form_of_number(value: Fraction, unit: str) -> str:
    if unit == "percent":
        return "percentage"
    kind = "integer" if value.denominator == 1 else "fraction or decimal"
    return f"{kind} with a unit" if unit else kind

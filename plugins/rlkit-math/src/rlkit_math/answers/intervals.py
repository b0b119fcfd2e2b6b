"""Intervals of inequalities, and the real numbers without some of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise, product

from rlkit_math.answers import evaluate
from rlkit_math.answers.expression import parse
from rlkit_math.answers.nodes import ExpressionNode
from rlkit_math.answers.quantities import as_quantity
from rlkit_math.answers.values import Answer, BracketedItems, Formula, Number, Relation, UnorderedItems

_REVERSED = {">": "<", ">=": "<="}
_INFINITY = ExpressionNode("variable", value="\\infty")
_MINUS_INFINITY = ExpressionNode("negative", (_INFINITY,))


def parse_inequality(signs: list[str], sides: list[str]) -> Relation | BracketedItems | UnorderedItems | None:
    """Parse an inequality, in ascending order; that of a single variable becomes an interval."""
    if signs[0] in _REVERSED:
        signs, sides = [_REVERSED.get(sign, "") for sign in reversed(signs)], sides[::-1]
    nodes = [parse(side) for side in sides]
    if not set(signs) <= {"<", "<="} and signs != ["!="]:
        return None
    complete = [node for node in nodes if node is not None]
    if len(complete) < len(nodes) or len(nodes) > 3 or not any(node.variables() for node in complete):
        return None
    relation = Relation(tuple(signs), tuple(complete))
    if signs == ["!="]:
        variable, number = complete if complete[0].name == "variable" else complete[::-1]
        return (reals_without([number]) if variable.name == "variable" else None) or relation
    return _interval(relation) or _outside(relation) or relation


def _outside(relation: Relation) -> UnorderedItems | None:
    """Return the two intervals of `|x| > 3`; None for other inequalities."""
    low, absolute = relation.sides[0], relation.sides[-1]
    if len(relation.sides) > 2 or absolute.name != "absolute" or absolute.operands[0].name != "variable":
        return None
    if low.variables() or low.name == "negative":
        return None
    closed = relation.signs[0] == "<="
    below = BracketedItems(
        "(]" if closed else "()", (as_quantity(_MINUS_INFINITY), as_quantity(ExpressionNode("negative", (low,))))
    )
    above = BracketedItems("[)" if closed else "()", (as_quantity(low), as_quantity(_INFINITY)))
    return UnorderedItems((below, above))


def _interval(relation: Relation) -> BracketedItems | None:
    """Return the interval of an inequality between a variable and numbers; None for other inequalities."""
    sides, signs = list(relation.sides), list(relation.signs)
    if len(sides) == 2 and sides[0].name == "absolute" and sides[0].operands[0].name == "variable":
        sides, signs = [ExpressionNode("negative", (sides[1],)), *sides[0].operands, sides[1]], signs * 2
    if len(sides) == 2 and sides[0].name == "variable":
        sides, signs = [_MINUS_INFINITY, *sides], ["<", *signs]
    elif len(sides) == 2:
        sides, signs = [*sides, _INFINITY], [*signs, "<"]
    if sides[1].name != "variable" or (sides[0].variables() | sides[2].variables()) - {"\\infty"}:
        return None
    brackets = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
    return BracketedItems(brackets, (as_quantity(sides[0]), as_quantity(sides[2])))


def reals_without(numbers: Sequence[ExpressionNode | None]) -> BracketedItems | UnorderedItems | None:
    """Return the intervals between numbers, in ascending order; None if one is no real number."""
    complete = [number for number in numbers if number is not None and not number.variables()]
    try:
        values = {node: evaluate.value_of(node) for node in complete}
    except evaluate.UndefinedError:
        return None
    if len(complete) < len(numbers) or any(value.imag for value in values.values()):
        return None
    ends = [_MINUS_INFINITY, *sorted(values, key=lambda node: values[node].real), _INFINITY]
    intervals = [BracketedItems("()", (as_quantity(low), as_quantity(high))) for low, high in pairwise(ends)]
    return UnorderedItems(tuple(intervals)) if numbers else intervals[0]


def intersection(sets: Sequence[Answer | None]) -> BracketedItems | UnorderedItems | None:
    """Return the intersection of intervals, or of unions of them; None if that is nothing, or one is no interval."""
    unions = [part.items if isinstance(part, UnorderedItems) else (part,) for part in sets]
    intervals = [tuple(part for part in union if isinstance(part, BracketedItems)) for union in unions]
    if any(len(union) < len(parts) for union, parts in zip(intervals, unions, strict=True)):
        return None
    common, *remaining = intervals
    try:
        for union in remaining:
            common = _common(common, union)
    except (evaluate.UndefinedError, ValueError):
        return None
    return common[0] if len(common) == 1 else UnorderedItems(common) if common else None


def _common(first: tuple[BracketedItems, ...], second: tuple[BracketedItems, ...]) -> tuple[BracketedItems, ...]:
    common = []
    for pair in product(first, second):
        low = max(pair, key=lambda interval: (_position(interval.items[0]), interval.brackets[0] == "("))
        high = min(pair, key=lambda interval: (_position(interval.items[1]), interval.brackets[1] == "]"))
        if _position(low.items[0]) < _position(high.items[1]):
            common.append(BracketedItems(low.brackets[0] + high.brackets[1], (low.items[0], high.items[1])))
    return tuple(common)


def _position(end: Answer) -> Fraction | float:
    """Return the value of an end of an interval.

    Raises:
        ValueError: The end is no real number.
    """
    if isinstance(end, Number):
        return end.readings[0]
    if not isinstance(end, Formula):
        raise ValueError("the end of an interval is no number")
    if end.node in (_INFINITY, _MINUS_INFINITY):
        return math.inf if end.node == _INFINITY else -math.inf
    value = evaluate.value_of(end.node) if not end.node.variables() else 1j
    if value.imag:
        raise ValueError("the end of an interval is no real number")
    return value if isinstance(value, Fraction) else value.real

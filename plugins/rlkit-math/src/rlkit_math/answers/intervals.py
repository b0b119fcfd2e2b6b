"""Intervals of inequalities, and the real numbers without some of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rlkit_math.answers import evaluate
from rlkit_math.answers.expression import parse
from rlkit_math.answers.nodes import ExpressionNode
from rlkit_math.answers.quantities import as_quantity
from rlkit_math.answers.values import BracketedItems, Relation, UnorderedItems

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
    return _interval(relation) or relation


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

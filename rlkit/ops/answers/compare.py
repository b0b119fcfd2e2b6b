"""Whether two answers are the same."""

from __future__ import annotations

from fractions import Fraction

from rlkit.ops.answers import evaluate
from rlkit.ops.answers.nodes import Node, has_calculation
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


def same(given: Answer, expected: Answer) -> bool:
    """Whether an answer is the same as the reference's.

    Raises:
        UngradableError: A value is too large to be compared.
    """
    match given, expected:
        case (Named(), Relation()) | (Relation(), Named()):
            return _same_relation(_as_relation(given), _as_relation(expected))
        case (Named(), Named()):
            return given.name == expected.name and same(given.value, expected.value)
        case (Named(), _):
            return same(given.value, expected)
        case (_, Named()):
            return same(given, expected.value)
        case (Relation(), Relation()):
            return _same_relation(given, expected)
        case (Number() | Formula(), Number() | Formula()):
            return _same_unit(given.unit, expected.unit) and _same_quantity(given, expected)
        case (Words(), Words()):
            return given.text.casefold() == expected.text.casefold()
        case (Words(text), Formula()) | (Formula(), Words(text)):
            other = expected if isinstance(expected, Formula) else given
            return isinstance(other, Formula) and other.node == Node("variable", value=text)
        case (Digits(), Digits()):
            halves = {given.half, expected.half} - {""}
            return given.kind == expected.kind and given.numbers == expected.numbers and len(halves) < 2
        case (Matrix(), Matrix()):
            return len(given.rows) == len(expected.rows) and all(map(_same_in_order, given.rows, expected.rows))
    return _same_items(given, expected)


def _same_items(given: Answer, expected: Answer) -> bool:
    """Compare lists, sets, tuples and intervals."""
    lists = [_unordered(answer) for answer in (given, expected)]
    if lists[0] is not None and lists[1] is not None:
        return _same_in_any_order(lists[0], lists[1])
    if isinstance(given, Group) and isinstance(expected, Group):
        return given.brackets == expected.brackets and _same_in_order(given.items, expected.items)
    return False


def _unordered(answer: Answer) -> tuple[Answer, ...] | None:
    if isinstance(answer, Several) or (isinstance(answer, Group) and answer.brackets == "{}"):
        return answer.items
    return None


def _same_in_order(given: tuple[Answer, ...], expected: tuple[Answer, ...]) -> bool:
    return len(given) == len(expected) and all(map(same, given, expected))


def _same_in_any_order(given: tuple[Answer, ...], expected: tuple[Answer, ...]) -> bool:
    names = [{item.name for item in items if isinstance(item, Named)} for items in (given, expected)]
    if len(given) != len(expected) or (max(map(len, names)) > 1 and names[0] != names[1]):
        return False
    left = list(expected)
    for item in given:
        equal = next((index for index, other in enumerate(left) if same(item, other)), None)
        if equal is None:
            return False
        del left[equal]
    return True


def _same_unit(given: str, expected: str) -> bool:
    return not given or not expected or given == expected


def _same_quantity(given: Number | Formula, expected: Number | Formula) -> bool:
    if isinstance(expected, Number) and isinstance(given, Number):
        if given.unit == expected.unit:
            return _close(given.readings[0], expected.readings[0])
        return any(_close(a, b) for a in given.readings for b in expected.readings)
    if isinstance(expected, Number) and isinstance(given, Formula) and has_calculation(given.node):
        return False
    if isinstance(expected, Formula) and isinstance(given, Formula):
        return evaluate.same(given.node, expected.node)
    number, formula = (given, expected) if isinstance(given, Number) else (expected, given)
    assert isinstance(number, Number) and isinstance(formula, Formula)  # noqa: PT018
    return not formula.node.variables() and any(_has_value(formula.node, value) for value in number.readings)


def _has_value(node: Node, number: Fraction) -> bool:
    """Whether a formula is a number, up to 1e-6 if that has decimals."""
    try:
        value = evaluate.value_of(node)
    except evaluate.UndefinedError:
        return False
    if isinstance(value, Fraction):
        return _close(number, value)
    if abs(value.imag) > evaluate.TOLERANCE:
        return False
    exact = Fraction(value.real)
    if number.denominator == 1:
        return abs(exact - number) <= abs(number) * Fraction(evaluate.TOLERANCE)
    return _close(number, exact)


def _close(given: Fraction, expected: Fraction) -> bool:
    """Whether two numbers are equal up to 1e-6 of the expected one, or of 1 where that is less: integers exactly."""
    if given.denominator == expected.denominator == 1:
        return given == expected
    tolerance = min(Fraction(1), abs(expected)) / 10**6
    return abs(given - expected) <= tolerance


def _as_relation(answer: Answer) -> Relation | None:
    """Return an equation, also of a name with a formula; None for a name with a number, which is no equation."""
    if isinstance(answer, Relation):
        return answer
    if isinstance(answer, Named) and isinstance(answer.value, Formula):
        return Relation(("=",), (Node("variable", value=answer.name), answer.value.node))
    return None


def _same_relation(given: Relation | None, expected: Relation | None) -> bool:
    if given is None or expected is None or given.signs != expected.signs:
        return False
    if all(map(evaluate.same, given.sides, expected.sides)):
        return True
    if len(given.sides) > 2:
        return False
    factor = evaluate.proportional(_difference(given), _difference(expected))
    return factor is not None and (given.signs[0] in ("=", "!=") or (factor.imag == 0 and factor.real > 0))


def _difference(relation: Relation) -> Node:
    left, right = relation.sides
    return Node("sum", (left, Node("negative", (right,))))

"""Comparison of answers."""

from __future__ import annotations

from fractions import Fraction

from rlkit_math.answers import evaluate
from rlkit_math.answers.nodes import ExpressionNode, has_calculation
from rlkit_math.answers.quantities import as_quantity
from rlkit_math.answers.units import WITHOUT_RATE, unit_of
from rlkit_math.answers.values import (
    Answer,
    BracketedItems,
    Digits,
    Formula,
    MatrixRows,
    Named,
    Number,
    Relation,
    UnorderedItems,
    Words,
)


def same(actual: Answer, expected: Answer) -> bool:
    """Whether an answer is the same as the reference.

    Raises:
        UngradableError: A value is too large to be compared.
    """
    if isinstance(actual, Named) or isinstance(expected, Named):
        return _same_named(actual, expected)
    match actual, expected:
        case (Relation(), Relation()):
            return _same_relation(actual, expected)
        case (Number() | Formula(), Number() | Formula()):
            return _same_unit(actual.unit, expected.unit) and _same_quantity(actual, expected)
        case (Words(), Words()):
            return actual.text.casefold() == expected.text.casefold()
        case (Words(text), Formula()) | (Formula(), Words(text)) if len(text) == 1:
            formula = expected if isinstance(expected, Formula) else actual
            return isinstance(formula, Formula) and evaluate.same(formula.node, ExpressionNode("variable", value=text))
        case (Digits("colon", (hour, "0"), half), Number((value,), "")) if half:
            return value == int(hour)
        case (Digits(), Digits()):
            halves = {actual.half, expected.half} - {""}
            return actual.kind == expected.kind and actual.numbers == expected.numbers and len(halves) < 2
        case (MatrixRows(), MatrixRows()):
            return len(actual.rows) == len(expected.rows) and all(map(_same_in_order, actual.rows, expected.rows))
    return _same_items(actual, expected)


def _same_named(actual: Answer, expected: Answer) -> bool:
    """Compare two answers of which at least one has a name."""
    assigned, others = _assigned(actual), _assigned(expected)
    if assigned and others:
        return assigned.keys() == others.keys() and all(same(value, others[name]) for name, value in assigned.items())
    match actual, expected:
        case (Named(), Relation()) | (Relation(), Named()):
            return _same_relation(_as_relation(actual), _as_relation(expected))
        case (Named(name), Words(text)) | (Words(text), Named(name)) if name == f"({text})":
            return True
        case (Named(), Named()) if actual.name != expected.name:
            return _same_relation(_as_relation(actual), _as_relation(expected))
    return same(*(answer.value if isinstance(answer, Named) else answer for answer in (actual, expected)))


def _same_items(actual: Answer, expected: Answer) -> bool:
    """Compare lists, sets, tuples and intervals."""
    lists = [_unordered(answer) for answer in (actual, expected)]
    if lists[0] is not None and lists[1] is not None:
        if _is_either(actual) != _is_either(expected):
            return False
        return _same_in_any_order(lists[0], lists[1])
    if isinstance(actual, BracketedItems) and isinstance(expected, BracketedItems):
        return actual.brackets == expected.brackets and _same_in_order(actual.items, expected.items)
    first, second = _mixed_number(actual), _mixed_number(expected)
    return first is not None and second is not None and same(first, second)


def _assigned(answer: Answer) -> dict[str, Answer] | None:
    """Return the values of `x=2, y=3` or `(x,y)=(2,3)` by their names; None for other answers."""
    match answer:
        case UnorderedItems(items, False):
            values = {item.name: item.value for item in items if isinstance(item, Named)}
        case Named(name, BracketedItems("()", items)) if name.startswith("("):
            values = dict(zip(name.strip("()").split(","), items, strict=False))
        case _:
            return None
    return values if len(values) == len(items) > 1 else None


def _mixed_number(answer: Answer) -> Number | Formula | None:
    """Return a number, or the one that a list such as `5 and 1/2` is as well."""
    if isinstance(answer, UnorderedItems):
        return answer.mixed
    return answer if isinstance(answer, Number | Formula) else None


def _is_either(answer: Answer) -> bool:
    return isinstance(answer, UnorderedItems) and answer.either


def _unordered(answer: Answer) -> tuple[Answer, ...] | None:
    if isinstance(answer, UnorderedItems) or (isinstance(answer, BracketedItems) and answer.brackets == "{}"):
        return answer.items
    return None


def _same_in_order(actual: tuple[Answer, ...], expected: tuple[Answer, ...]) -> bool:
    return len(actual) == len(expected) and all(map(same, actual, expected))


def _same_in_any_order(actual: tuple[Answer, ...], expected: tuple[Answer, ...]) -> bool:
    names = [{item.name.partition("_")[0] for item in items if isinstance(item, Named)} for items in (actual, expected)]
    if len(actual) != len(expected) or (max(map(len, names)) > 1 and names[0] != names[1]):
        return False
    unmatched = list(expected)
    for item in actual:
        index = next((index for index, candidate in enumerate(unmatched) if same(item, candidate)), None)
        if index is None:
            return False
        del unmatched[index]
    return True


def _same_unit(actual: str, expected: str) -> bool:
    """Whether no known unit differs: a dollar is one a day, but one a day is none a week, and a metre none a second."""
    if not actual or not expected:
        return True
    (above, _, below), (other_above, _, other_below) = actual.partition("/"), expected.partition("/")
    if below and other_below:
        return below == other_below and (above == other_above or not above or not other_above)
    return above == other_above and (below == other_below or above in WITHOUT_RATE)


def _same_quantity(actual: Number | Formula, expected: Number | Formula) -> bool:
    if isinstance(expected, Number) and isinstance(actual, Number):
        if actual.unit == expected.unit:
            return _close(actual.readings[0], expected.readings[0])
        return any(_close(a, b) for a in actual.readings for b in expected.readings)
    if isinstance(expected, Number) and isinstance(actual, Formula) and has_calculation(actual.node):
        return False
    if isinstance(expected, Formula) and isinstance(actual, Formula):
        return evaluate.same(actual.node, expected.node)
    number, formula = (actual, expected) if isinstance(actual, Number) else (expected, actual)
    assert isinstance(number, Number) and isinstance(formula, Formula)  # noqa: PT018
    if formula.node.variables():
        return number == _measurement(formula.node)
    return any(_has_value(formula.node, value) for value in number.readings)


def _measurement(node: ExpressionNode) -> Number | Formula | None:
    """Return `5m` with its unit, as beside `5 m`; None for other formulae."""
    match node:
        case ExpressionNode("product", (amount, ExpressionNode("variable", value=str(letter)))):
            unit = unit_of(letter)
            return as_quantity(amount, unit) if unit else None
    return None


def _has_value(node: ExpressionNode, number: Fraction) -> bool:
    """Whether a formula equals a number, up to 1e-6 if the number has decimals."""
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


def _close(actual: Fraction, expected: Fraction) -> bool:
    """Whether two numbers are equal up to 1e-6 * min(1, |expected|); integers must be equal exactly."""
    if actual.denominator == expected.denominator == 1:
        return actual == expected
    tolerance = min(Fraction(1), abs(expected)) / 10**6
    return abs(actual - expected) <= tolerance


def _as_relation(answer: Answer) -> Relation | None:
    """Return a relation, or the equation of a named formula; None for all other answers."""
    if isinstance(answer, Relation):
        return answer
    if isinstance(answer, Named) and isinstance(answer.value, Formula):
        return Relation(("=",), (ExpressionNode("variable", value=answer.name), answer.value.node))
    return None


def _same_relation(actual: Relation | None, expected: Relation | None) -> bool:
    if actual is None or expected is None or actual.signs != expected.signs:
        return False
    if all(map(evaluate.same, actual.sides, expected.sides)):
        return True
    if len(actual.sides) > 2:
        return False
    factor = evaluate.proportional(_difference(actual), _difference(expected))
    return factor is not None and (actual.signs[0] in ("=", "!=") or (factor.imag == 0 and factor.real > 0))


def _difference(relation: Relation) -> ExpressionNode:
    minuend, subtrahend = relation.sides
    return ExpressionNode("sum", (minuend, ExpressionNode("negative", (subtrahend,))))

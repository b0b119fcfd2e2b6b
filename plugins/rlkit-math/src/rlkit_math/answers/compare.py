"""Comparison of answers."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import permutations, product, starmap

from rlkit_math.answers import evaluate
from rlkit_math.answers.nodes import ExpressionNode, has_calculation
from rlkit_math.answers.quantities import as_quantity
from rlkit_math.answers.units import UNITS_BY_LETTER, conversion, unit_of
from rlkit_math.answers.values import (
    Answer,
    BracketedItems,
    Digits,
    Formula,
    MatrixRows,
    Named,
    Notations,
    Number,
    Relation,
    UnorderedItems,
    Words,
    node_of,
)

_INDEXED_CONSTANT = re.compile(r"[CcK]_\w+")
_LETTERS_OF_CONSTANTS = {letter + index for letter in "ABCDKcdk" for index in ("", "_0", "_1", "_2", "_3")}
MAX_CONSTANTS = 3
"""Maximum number of constants of integration that are compared up to their letters."""
_CONSTANT_TERM = ExpressionNode("variable", value="C")
_ONE = ExpressionNode("number", value=Fraction(1))
_OTHERWISE = Words("otherwise")
_ZERO = ExpressionNode("number", value=Fraction(0))
_FUNCTION = re.compile(r"\w+'*(?:\^-1)?\([a-z]\)")


def same(actual: Answer, expected: Answer) -> bool:
    """Whether an answer is the same as the reference.

    Raises:
        UngradableError: A value is too large to be compared.
    """
    (actual, domain), (expected, other_domain) = _without_domain(actual), _without_domain(expected)
    if domain != other_domain and domain and other_domain:
        return False
    if isinstance(actual, Named | Notations) or isinstance(expected, Named | Notations):
        return _same_named(actual, expected)
    match actual, expected:
        case (Relation(), Relation()):
            return _same_relation(actual, expected)
        case (Number() | Formula(), Number() | Formula()):
            factor = conversion(actual.unit, expected.unit)
            return factor is not None and _same_quantity(actual, expected, factor)
        case (Words(), Words()):
            return actual.text.casefold() == expected.text.casefold()
        case (Words(text), Formula()) | (Formula(), Words(text)) if len(text) == 1:
            formula = expected if isinstance(expected, Formula) else actual
            return isinstance(formula, Formula) and evaluate.same(formula.node, ExpressionNode("variable", value=text))
        case (Digits("time", (hour, "0"), half), Number((value,), "")) if half:
            return value == int(hour)
        case (Digits("time" | "ratio", parts, ""), Digits("time" | "ratio", expected_parts, "")) if (
            parts != expected_parts
        ):
            terms, expected_terms = list(map(int, parts)), list(map(int, expected_parts))
            is_equal = [n * sum(expected_terms) for n in terms] == [n * sum(terms) for n in expected_terms]
            is_ratio = "ratio" in (actual.kind, expected.kind)  # otherwise both can be times
            return is_ratio and any(terms) and any(expected_terms) and is_equal
        case (Digits("time" | "ratio"), Digits("time" | "ratio")):
            return _same_time(actual, expected) or _same_time(expected, actual)
        case (Digits() as digits, other) | (other, Digits() as digits) if isinstance(other, Digits | Formula):
            return digits == other or (isinstance(other, Formula) and _runs_over(other.node, digits))
        case (Relation(("=",), (left, right)), Number()) if len(left.variables()) > 1 and not right.variables():
            return same(as_quantity(right), expected)  # `m + n = 73`, which no unknown but the question can mean
        case (MatrixRows(), MatrixRows()):
            is_shaped_alike = not expected.is_product and len(actual.rows) == len(expected.rows)
            return is_shaped_alike and all(map(_same_in_order, actual.rows, expected.rows))
    return _same_items(actual, expected)


def _same_named(actual: Answer, expected: Answer) -> bool:
    """Compare two answers of which at least one has a name or two notations."""
    if isinstance(actual, Notations) and isinstance(expected, Number) and not expected.unit:
        units = [item.unit for item in actual.items if isinstance(item, Number | Formula)]
        if len(units) == len(actual.items) and all(units) and "percent" not in units:
            return same(actual.items[0], expected)  # 90 minutes (1.5 hours), which are equal, for 90
    if isinstance(actual, Notations) or isinstance(expected, Notations):
        return all(starmap(same, product(_notations(actual), _notations(expected))))
    assigned, values = _assigned(actual), _assigned(expected)
    if assigned and values:
        return assigned.keys() == values.keys() and all(same(value, values[name]) for name, value in assigned.items())
    match actual, expected:
        case (Named(_, Number()), Relation(_, sides)) | (Relation(_, sides), Named(_, Number())) if _ZERO not in sides:
            return False  # 2x = 10 is not solved
        case (Named(), Relation()) | (Relation(), Named()):
            return _same_relation(_as_relation(actual), _as_relation(expected))
        case (Named(name), Words(text)) | (Words(text), Named(name)) if name == f"({text})":
            return True
        case (Named("y"), Named(name)) | (Named(name), Named("y")) if _FUNCTION.fullmatch(name):
            return same(actual.value, expected.value)
        case (Named(name, Formula(node)), Named(other_name, Formula() as formula)) if _FUNCTION.fullmatch(other_name):
            function, argument = other_name[:-3], other_name[-2]
            names = {text.removesuffix("^-1") for text in (name[:-3], function)}
            is_same = _FUNCTION.fullmatch(name) is not None and len(names) == 1
            return is_same and same(Formula(node.renamed({name[-2]: argument})), formula)
        case (Named(), Named()) if actual.name != expected.name:
            return _same_relation(_as_relation(actual), _as_relation(expected))
    return same(*(answer.value if isinstance(answer, Named) else answer for answer in (actual, expected)))


def _notations(answer: Answer) -> tuple[Answer, ...]:
    return answer.items if isinstance(answer, Notations) else (answer,)


def _choices(answer: Answer) -> set[str]:
    """Return the letters of several choices, as `A, C` or `AC` writes them; empty for other answers."""
    match answer:
        case UnorderedItems(items, False):
            letters = [item.text if isinstance(item, Words) else "" for item in items]
        case Formula(ExpressionNode("product", factors)):
            letters = [str(factor.value) for factor in factors]
        case _:
            letters = list(answer.text) if isinstance(answer, Words) else []
    return set(letters) if len(letters) > 1 and set("ABCDEFGH").issuperset(letters) else set()


def _same_time(first: Digits, second: Digits) -> bool:
    """Whether two times are the same where only one may have its half of the day: 15:30 is 3:30 PM."""
    if second.half and not first.half and int(first.numbers[0]) > 12:
        hour, *rest = first.numbers
        first = Digits("time", (str(int(hour) - 12), *rest), "p")
    if second.half and not first.half and first.numbers[0] == "0":
        first = Digits("time", ("12", *first.numbers[1:]), "a")
    return first.numbers == second.numbers and len({first.half, second.half} - {""}) < 2


def _same_items(actual: Answer, expected: Answer) -> bool:
    """Compare lists, sets, tuples and intervals."""
    if not {type(actual), type(expected)}.isdisjoint({Words, Formula}) and _choices(actual):
        return _choices(actual) == _choices(expected)
    match actual, expected:
        case (Number(), Digits("time" | "ratio" as kind, (above, below), "") as digits) | (
            Digits("time" | "ratio" as kind, (above, below), "") as digits,
            Number(),
        ) if int(below) >= {"time": 10, "ratio": 1}[kind]:  # 9:16 may be 9/16, but 10:05 is a time
            number, quotient = (expected if actual is digits else actual), Fraction(int(above), int(below))
            return (actual is not digits or quotient.denominator > 1) and same(number, Number((quotient,)))
        case (Number() as number, Digits(is_number=True) as digits) | (
            Digits(is_number=True) as digits,
            Number() as number,
        ):
            return same(number, Number((Fraction(digits.numbers[0]),)))
    match actual, expected:
        case (BracketedItems("[]", (_, _, _, *_) as listed), UnorderedItems(values, False)):
            return _same_in_any_order(listed, values)  # two would be an interval
    items, expected_items = _unordered(actual), _unordered(expected)
    if items is not None and expected_items is not None:
        return _is_either(actual) == _is_either(expected) and _same_in_any_order(items, expected_items)
    if isinstance(actual, Number | Formula) and isinstance(expected, UnorderedItems) and expected.decimal is not None:
        return same(actual, expected.decimal)
    if BracketedItems in (type(actual), type(expected)) and ":" in (_brackets(actual), _brackets(expected)):
        return _same_ratio(actual, expected)
    if isinstance(actual, BracketedItems) and isinstance(expected, BracketedItems):
        if actual.brackets == expected.brackets == "if" and _OTHERWISE in (actual.items[1], expected.items[1]):
            return same(actual.items[0], expected.items[0])
        is_tuple = {actual.brackets, expected.brackets} == {"()", "[]"} and len(expected.items) > 2  # no interval
        is_same_kind = actual.brackets == expected.brackets or is_tuple
        return is_same_kind and _same_in_order(actual.items, expected.items)
    if {type(actual), type(expected)} == {MatrixRows, UnorderedItems}:
        return False
    if not {BracketedItems, MatrixRows}.isdisjoint({type(actual), type(expected)}):
        coordinates, expected_coordinates = _coordinates(actual), _coordinates(expected)
        return (
            coordinates is not None
            and expected_coordinates is not None
            and _same_in_order(coordinates, expected_coordinates)
        )
    first, second = _mixed_number(actual), _mixed_number(expected)
    return first is not None and second is not None and same(first, second)


def _brackets(answer: Answer) -> str:
    return answer.brackets if isinstance(answer, BracketedItems) else ""


def _same_ratio(actual: Answer, expected: Answer) -> bool:
    """Compare a ratio with another, or with its value; `x:1` is no answer to `x`."""
    match actual, expected:
        case (Number() | Formula(), BracketedItems(_, (quotient,))):
            return same(actual, quotient)
        case (BracketedItems(_, (Formula(ExpressionNode("ratio", (_, below))) as quotient,)), Number() | Formula()):
            return below != _ONE and same(expected, quotient)
    quotients, expected_quotients = _quotients(actual), _quotients(expected)
    return bool(quotients) and _same_in_order(quotients, expected_quotients)


def _quotients(answer: Answer) -> tuple[Answer, ...]:
    """Return the terms of a ratio divided by the last term, but the last; empty for other answers."""
    match answer:
        case Digits("time" | "ratio", (*above, below), "") if int(below):
            terms = [ExpressionNode("number", value=Fraction(term)) for term in (*above, below)]
            return tuple(Formula(ExpressionNode("ratio", (term, terms[-1]))) for term in terms[:-1])
        case BracketedItems(":", items):
            return items
    return ()


def _without_domain(answer: Answer) -> tuple[Answer, str]:
    """Return an answer without the set of its integers, such as `k \\in Z`, and that set."""
    match answer:
        case UnorderedItems((Number() | Formula() | Named(), *_, Words(domain)) as items, False) if (
            domain in ("Z", "N") or not domain.isalpha()
        ):
            items = items[:-1]
            return (items[0] if len(items) == 1 else UnorderedItems(items)), domain
    return answer, ""


def _coordinates(answer: Answer) -> tuple[Answer, ...] | None:
    """Return the coordinates of a point, of a matrix of a single row or column, or of `x = 2, y = 3` by name."""
    match answer:
        case UnorderedItems():
            assigned = _assigned(answer) or {}
            return tuple(assigned[name] for name in sorted(assigned, key=str.casefold)) or None
        case BracketedItems("()" | "[]", items):
            return items
        case Formula(node, ""):
            return _components(node)
        case MatrixRows((row,)):
            return row
        case MatrixRows(rows) if len(rows[0]) == 1:
            return tuple(cell for (cell,) in rows)
    return None


def _components(node: ExpressionNode) -> tuple[Answer, ...] | None:
    """Return the coordinates of `2i + 3j - k`; None for other formulae."""
    terms = [_component(term) for term in (node.operands if node.name == "sum" else (node,))]
    components = {name: amount for name, amount in terms if name}
    if len(components) < len(terms) or {"j", "k"}.isdisjoint(components):
        return None
    return tuple(as_quantity(components.get(name, _ZERO)) for name in ("ijk" if "k" in components else "ij"))


def _component(term: ExpressionNode) -> tuple[str, ExpressionNode]:
    """Return the unit vector of a term and its factor; an empty name if there is none."""
    match term:
        case ExpressionNode("negative", (positive,)):
            name, amount = _component(positive)
            return name, ExpressionNode("negative", (amount,))
        case ExpressionNode("product", (*factors, ExpressionNode("variable", value="i" | "j" | "k" as name))):
            return str(name), factors[0] if len(factors) == 1 else ExpressionNode("product", tuple(factors))
        case ExpressionNode("variable", value="i" | "j" | "k" as name):
            return str(name), _ONE
    return "", term


def _runs_over(formula: ExpressionNode, digits: Digits) -> bool:
    """Whether the values of `5k + 2` are the integers of a residue."""
    letters = formula.variables()
    if digits.kind != "residue":
        return False
    residue, modulus = map(int, digits.numbers)
    try:
        first, second, third = (evaluate.value_of(formula, dict.fromkeys(letters, Fraction(n))) for n in range(3))
    except evaluate.UndefinedError:
        return False
    is_linear = len(letters) == 1 and second - first == third - second and abs(second - first) == modulus
    return is_linear and isinstance(first, Fraction) and (first - residue) % modulus == 0


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
    if names[0] and len({item.name for item in expected if isinstance(item, Named)}) == 1:  # x_1, x_2 for x
        actual, expected = _values(actual), _values(expected)
    unmatched = list(expected)
    for item in actual:
        candidates = (n for n, choice in enumerate(unmatched) if agree_in_nouns(item, choice) and same(item, choice))
        index = next(candidates, None)
        if index is None:
            return False
        del unmatched[index]
    return True


def _values(items: tuple[Answer, ...]) -> tuple[Answer, ...]:
    return tuple(item.value if isinstance(item, Named) else item for item in items)


def agree_in_nouns(actual: Answer, expected: Answer) -> bool:
    """Whether two items of lists count the same thing, if both say what: `2 red marbles` and `2 red`."""
    if not isinstance(actual, Number) or not isinstance(expected, Number) or not actual.noun or not expected.noun:
        return True
    return actual.noun <= expected.noun or expected.noun <= actual.noun


def _same_quantity(actual: Number | Formula, expected: Number | Formula, factor: Fraction) -> bool:
    """Compare an answer, multiplied by the factor from its unit to the reference's, with the reference."""
    if isinstance(expected, Number) and isinstance(actual, Number):
        if actual.unit == expected.unit:
            return _close(actual.readings[0], expected.readings[0])
        return any(_close(a * factor, b) for a in _meant(actual) for b in expected.readings)
    if isinstance(expected, Number) and isinstance(actual, Formula) and has_calculation(actual.node):
        return False
    if isinstance(expected, Formula) and isinstance(actual, Formula):
        scaled = ExpressionNode("product", (ExpressionNode("number", value=factor), actual.node))
        return _same_formula(actual.node if factor == 1 else scaled, expected.node)
    number, formula = (actual, expected) if isinstance(actual, Number) else (expected, actual)
    assert isinstance(number, Number) and isinstance(formula, Formula)  # noqa: PT018
    if formula.rounded is not None and same(formula.rounded, number):
        return True
    if formula.node.variables():
        measurement = _measurement(formula.node)
        return bool(number.unit) and measurement is not None and same(number, measurement)
    scale = factor if number is actual else 1 / factor
    if number.unit == "degree" and not formula.unit and formula.node.has(("pi",)):
        return _has_value(ExpressionNode("ratio", (formula.node, ExpressionNode("degree"))), number.readings[0])
    return any(_has_value(formula.node, value * scale) for value in number.readings)


def _same_formula(actual: ExpressionNode, expected: ExpressionNode) -> bool:
    """Compare up to the letter of a constant of integration, or of the integer in a family of angles."""
    own, unmatched = actual.variables() - expected.variables(), expected.variables() - actual.variables()
    letters = own | unmatched
    is_family = letters <= set("klmn") and expected.has(("pi", "degree"))
    is_indexed = all(map(_INDEXED_CONSTANT.fullmatch, unmatched)) and letters <= _LETTERS_OF_CONSTANTS | unmatched
    is_free = is_indexed or letters <= set("CcK")
    is_renamed = len(own) == len(unmatched) <= MAX_CONSTANTS and (is_family or is_free)
    for names in permutations(unmatched) if is_renamed else [()]:
        if evaluate.same(actual.renamed(dict(zip(own, names, strict=False))), expected):
            return True
    difference = _difference(Relation(("=",), (actual, expected)))
    return _is_antiderivative(actual, expected) and evaluate.proportional(difference, _ONE) is not None


def _is_antiderivative(*nodes: ExpressionNode) -> bool:
    """Whether expressions of one small letter have a constant of integration `C` as a term, and nowhere else."""
    terms = [term for node in nodes for term in node.operands if term != _CONSTANT_TERM]
    variables = set[str]().union(*(term.variables() for term in terms))
    is_sum = all(node.name == "sum" and _CONSTANT_TERM in node.operands for node in nodes)
    return is_sum and len(variables) == 1 and all(map(str.islower, variables))


def _meant(answer: Number) -> tuple[Fraction, ...]:
    """Return the readings of an answer beside another unit: 0.5% is 0.005 alone, as no percentage lost its sign."""
    return answer.readings if abs(answer.readings[0]) >= 1 else answer.readings[-1:]


def _measurement(node: ExpressionNode) -> Number | Formula | None:
    """Return `5m` with its unit, as beside `5 m`; None for other formulae."""
    match node:
        case ExpressionNode("product", (amount, ExpressionNode("variable", value=str(letter)))):
            unit = UNITS_BY_LETTER.get(letter) or unit_of(letter)
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
    if isinstance(answer, Named) and isinstance(answer.value, Formula | Number):
        name = "y" if _FUNCTION.fullmatch(answer.name) else answer.name
        return Relation(("=",), (ExpressionNode("variable", value=name), node_of(answer.value)))
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

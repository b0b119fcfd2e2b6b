"""Values of expressions, exact if rational; equality of expressions with variables at sample points."""

from __future__ import annotations

import cmath
import hashlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import partial, reduce

from rlkit_math.answers.nodes import ExpressionNode, UngradableError

LARGEST_BITS = 2**15
"""Maximum bits of an exact value; larger values are refused."""
LARGEST_ARGUMENT = 2500
"""Maximum argument of factorials and binomial coefficients."""
LARGEST_DEGREE = 100
"""Maximum degree of an exact root."""
TOLERANCE = 1e-9
"""Relative difference up to which two inexact values are equal."""
POINTS = 6
"""Number of points at which expressions with variables are compared; half of them are positive integers."""

_TOO_LARGE = UngradableError("the value of the answer is too large to be compared")

Value = Fraction | complex
Point = Mapping[str, Fraction]
_ZERO: Value = Fraction(0)
_ONE: Value = Fraction(1)


class UndefinedError(ValueError):
    """An expression has no value at a point, for example because of a division by zero."""


def value_of(node: ExpressionNode, point: Point | None = None) -> Value:
    """Return the value of an expression with the variables of a point.

    Raises:
        UndefinedError: The expression has no value at the point.
        UngradableError: The value is too large.
    """
    try:
        value = _value(node, point or {})
    except (ZeroDivisionError, ValueError, TypeError) as error:
        raise UndefinedError(str(error)) from error
    except (OverflowError, RecursionError) as error:
        raise _TOO_LARGE from error
    if isinstance(value, complex) and not cmath.isfinite(value):
        raise UndefinedError("the value is not finite")
    return value


def same(first: ExpressionNode, second: ExpressionNode) -> bool:
    """Whether two expressions have the same values at all sample points."""
    compared = 0
    for point in points(
        first.variables() | second.variables(), any(node.has(("factorial", "binomial")) for node in (first, second))
    ):
        first_value, second_value = _value_or_none(first, point), _value_or_none(second, point)
        if first_value is None and second_value is None:
            continue
        if first_value is None or second_value is None or not same_value(first_value, second_value):
            return False
        compared += 1
    return compared > 0


def proportional(numerator: ExpressionNode, denominator: ExpressionNode) -> complex | None:
    """Return the ratio of two expressions if it is the same at all sample points, else None."""
    ratios: list[complex] = []
    for point in points(numerator.variables() | denominator.variables()):
        above, below = _value_or_none(numerator, point), _value_or_none(denominator, point)
        if above is None or below is None or above == 0 or below == 0:
            continue
        ratios.append(_inexact(above) / _inexact(below))
    if len(ratios) < 2 or not all(same_value(ratios[0], ratio) for ratio in ratios):
        return None
    return ratios[0]


def same_value(first: Value, second: Value) -> bool:
    """Whether two values are equal: exactly if both are rational, else up to rounding."""
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first == second
    a, b = _inexact(first), _inexact(second)
    return abs(a - b) <= TOLERANCE * max(abs(a), abs(b), 1e-3)


def points(variables: set[str], discrete: bool = False) -> Iterator[Point]:
    """Yield the points at which expressions are compared, of integers if discrete; a single one without variables."""
    for index in range(POINTS if variables else 1):
        yield {name: _coordinate(name, 2 * index + 1 if discrete else index) for name in variables}


def _coordinate(name: str, index: int) -> Fraction:
    digest = hashlib.blake2b(f"{index}/{name}".encode(), digest_size=4).digest()
    random = int.from_bytes(digest, "little")
    if index % 2:
        return Fraction(2 + random % 23)
    return Fraction(100 + random % 997, 331) * (-1 if index % 4 else 1)


def _value_or_none(node: ExpressionNode, point: Point) -> Value | None:
    try:
        return value_of(node, point)
    except UndefinedError:
        return None


def _value(node: ExpressionNode, point: Point) -> Value:
    if isinstance(node.value, Fraction):
        return node.value
    if node.name == "variable":
        return _variable(str(node.value), point)
    if node.name in ("pi", "degree"):
        return complex(math.pi if node.name == "pi" else math.pi / 180)
    values = [_value(operand, point) for operand in node.operands]
    if node.name in _EXACT:
        return _bounded(_EXACT[node.name](values))
    return complex(_FUNCTIONS[node.name](*map(_inexact, values)))


def _variable(name: str, point: Point) -> Value:
    if name in ("e", "i"):
        return complex(math.e) if name == "e" else 1j
    return point[name]


def _bounded(value: Value) -> Value:
    if isinstance(value, Fraction) and value.numerator.bit_length() + value.denominator.bit_length() > LARGEST_BITS:
        raise OverflowError
    return value


def _inexact(value: Value) -> complex:
    if isinstance(value, complex):
        return value
    try:
        return complex(float(value))
    except OverflowError as error:
        raise _TOO_LARGE from error


def _sum(values: list[Value]) -> Value:
    return reduce(partial(_combine, operator.add), values, _ZERO)


def _product(values: list[Value]) -> Value:
    return reduce(lambda total, value: _bounded(_combine(operator.mul, total, value)), values, _ONE)


def _combine(operation: Callable[..., Value], first: Value, second: Value) -> Value:
    is_exact = isinstance(first, Fraction) and isinstance(second, Fraction)
    return operation(first, second) if is_exact else operation(_inexact(first), _inexact(second))


def _power(values: list[Value]) -> Value:
    base, exponent = values
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator <= LARGEST_DEGREE:
        raised = _integer_power(base, exponent.numerator)
        return raised if exponent.denominator == 1 else _root([raised, Fraction(exponent.denominator)])
    if exponent == 0 or base == 0:
        raise ValueError("a power of zero")
    return _inexact(base) ** _inexact(exponent)


def _integer_power(base: Fraction, exponent: int) -> Fraction:
    if abs(base) in (0, 1):
        return base ** (exponent if exponent in (0, 1) or base == 0 else exponent % 2)
    if (base.numerator.bit_length() + base.denominator.bit_length()) * abs(exponent) > LARGEST_BITS:
        raise OverflowError
    return base**exponent


def _root(values: list[Value]) -> Value:
    """Return the principal root; for a negative number and an odd degree, the real root."""
    radicand, degree = values
    if not isinstance(degree, Fraction) or degree.denominator != 1 or not 1 <= degree <= LARGEST_DEGREE:
        raise ValueError("the degree of a root is not a small integer")
    if not isinstance(radicand, Fraction):
        return radicand ** (1 / int(degree))
    if radicand < 0:
        if degree % 2:
            return _product([Fraction(-1), _root([-radicand, degree])])
        return _product([_inexact(_root([-radicand, degree])), cmath.exp(1j * math.pi / int(degree))])
    above, below = (_integer_root(n, int(degree)) for n in (radicand.numerator, radicand.denominator))
    if above is not None and below is not None:
        return Fraction(above, below)
    return complex(float(radicand) ** (1 / int(degree)))


def _integer_root(number: int, degree: int) -> int | None:
    """Return the exact root of an integer; None if it is irrational."""
    guess = math.isqrt(number) if degree == 2 else round(float(number) ** (1 / degree))
    return guess if guess**degree == number else None


def _natural(value: Value) -> int:
    if not isinstance(value, Fraction) or value.denominator != 1 or value < 0:
        raise ValueError("not a natural number")
    if value > LARGEST_ARGUMENT:
        raise OverflowError
    return value.numerator


def _rounded(value: Value, towards: Callable[[Fraction], int]) -> Fraction:
    return Fraction(towards(value if isinstance(value, Fraction) else Fraction(_real(value))))


def _real(value: complex) -> float:
    if abs(value.imag) > TOLERANCE:
        raise ValueError("not a real number")
    return value.real


_EXACT: dict[str, Callable[[list[Value]], Value]] = {
    "sum": _sum,
    "mixed": _sum,
    "product": _product,
    "scale": _product,
    "negative": lambda values: -values[0],
    "ratio": lambda values: _combine(operator.truediv, *values),
    "power": _power,
    "root": _root,
    "absolute": lambda values: abs(values[0]) if isinstance(values[0], Fraction) else complex(abs(values[0])),
    "factorial": lambda values: Fraction(math.factorial(_natural(values[0]))),
    "binomial": lambda values: Fraction(math.comb(_natural(values[0]), _natural(values[1]))),
    "floor": lambda values: _rounded(values[0], math.floor),
    "ceil": lambda values: _rounded(values[0], math.ceil),
}
_FUNCTIONS: dict[str, Callable[..., complex]] = {
    **{name: getattr(cmath, name) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh", "exp")},
    **{f"arc{name}": getattr(cmath, f"a{name}") for name in ("sin", "cos", "tan")},
    "cot": lambda x: 1 / cmath.tan(x),
    "sec": lambda x: 1 / cmath.cos(x),
    "csc": lambda x: 1 / cmath.sin(x),
    "ln": cmath.log,
    "lg": cmath.log10,
    "log": lambda x, base=10: cmath.log(x, base),
}

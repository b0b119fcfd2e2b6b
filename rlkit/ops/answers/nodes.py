"""Expressions as trees."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from rlkit.errors import RlkitError

_ARITHMETIC = frozenset(
    {"number", "mixed", "scale", "negative", "ratio", "sum", "product", "factorial", "binomial", "absolute"}
)


class UngradableError(RlkitError):
    """A final answer is so large or so deep that comparing it might not end."""


@dataclass(frozen=True)
class Node:
    """An operation on others, by name; leaves are `number` and `variable`, whose content is `value`.

    Sums and products have any number of operands. `scale` is a product with a power of ten, `mixed` a whole number
    with a fraction, and `negative`, `ratio` (of two operands), `power`, `factorial` and the functions mean what they
    say.
    """

    name: str
    operands: tuple[Node, ...] = ()
    value: Fraction | str = ""

    def variables(self) -> set[str]:
        """Return the names of all variables; `e` and `i` are constants."""
        if self.name == "variable":
            return {str(self.value)} - {"e", "i"}
        return set().union(*(operand.variables() for operand in self.operands))


def is_finished(node: Node) -> bool:
    """Whether a number is written out: an integer, a decimal, a fraction, a mixed number, a power, a factorial."""
    match node.name:
        case "number" | "mixed" | "scale":
            return True
        case "negative":
            return is_finished(node.operands[0])
        case "ratio" | "power" | "binomial":
            return all(map(is_signed, node.operands))
        case "factorial":
            return is_signed(node.operands[0])
    return False


def has_calculation(node: Node) -> bool:
    """Whether numbers without variables, roots or functions are still to be added or multiplied in an expression."""
    if node.name in ("sum", "product") and sum(map(_is_rational, node.operands)) > 1:
        return True
    if node.name == "ratio" and all(map(_is_rational, node.operands)) and not is_finished(node):
        return True
    return any(map(has_calculation, node.operands))


def is_signed(node: Node) -> bool:
    """Whether a node is a number, with or without a sign."""
    return node.name == "number" or (node.name == "negative" and is_signed(node.operands[0]))


def _is_rational(node: Node) -> bool:
    return node.name in _ARITHMETIC and all(map(_is_rational, node.operands))

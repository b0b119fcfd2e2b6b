"""Expression trees."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from rlkit.base.errors import RlkitError

_ARITHMETIC = frozenset({"number", "mixed", "scale", "negative", "ratio", "sum", "product", "absolute"})


class UngradableError(RlkitError):
    """A final answer is too large or too deeply nested to be compared in bounded time."""


@dataclass(frozen=True)
class ExpressionNode:
    """A named operation on operands; leaves are `number` and `variable`, whose content is `value`.

    Sums and products have any number of operands. `scale` is a product with a power of ten, and `mixed` an integer
    with a fraction. `negative`, `ratio` (of two operands), `power`, `factorial` and functions mean what they say.
    """

    name: str
    operands: tuple[ExpressionNode, ...] = ()
    value: Fraction | str = ""

    def variables(self) -> set[str]:
        """Return the names of all variables; `e` and `i` are constants."""
        if self.name == "variable":
            return {str(self.value)} - {"e", "i"}
        return set().union(*(operand.variables() for operand in self.operands))

    def renamed(self, names: Mapping[str, str]) -> ExpressionNode:
        """Return the expression with other names of variables."""
        if self.name == "variable":
            return replace(self, value=names.get(str(self.value), self.value))
        return replace(self, operands=tuple(operand.renamed(names) for operand in self.operands))

    def has(self, names: Container[str]) -> bool:
        """Whether the expression contains one of these operations or constants."""
        return self.name in names or any(operand.has(names) for operand in self.operands)


def is_finished(node: ExpressionNode) -> bool:
    """Whether a number is in final form: an integer, decimal, fraction, mixed number, power or factorial."""
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


def has_calculation(node: ExpressionNode) -> bool:
    """Whether an expression contains an unfinished sum, product or ratio of rational numbers."""
    if node.name in ("sum", "product") and sum(map(_is_rational, node.operands)) > 1:
        return True
    if node.name == "ratio" and all(map(_is_rational, node.operands)) and not is_finished(node):
        return True
    return any(map(has_calculation, node.operands))


def is_signed(node: ExpressionNode) -> bool:
    """Whether a node is a number, with or without a sign."""
    return node.name == "number" or (node.name == "negative" and is_signed(node.operands[0]))


def _is_rational(node: ExpressionNode) -> bool:
    return node.name in _ARITHMETIC and all(map(_is_rational, node.operands))

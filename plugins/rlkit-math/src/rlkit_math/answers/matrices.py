"""Matrices: rows of cells, which a constant factor may precede."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from rlkit_math.answers.expression import parse
from rlkit_math.answers.nodes import ExpressionNode
from rlkit_math.answers.notations import number_value
from rlkit_math.answers.quantities import as_quantity
from rlkit_math.answers.values import Answer, Formula, MatrixRows, Number, Words, node_of

_MATRIX = re.compile(
    r"(?:([^&¶]*[^&¶ (\[]) ?)??[(\[]? ?\\begin ?\{(array|(?:[pb]|small)?matrix)\} ?(?:\{[clr| ]*\})?(.*)"
    r"\\end ?\{\2\} ?[)\]]?"
)


def parse_matrix(text: str, parse_cell: Callable[[str], Answer | None]) -> MatrixRows | None:
    """Parse a matrix, which a constant factor may precede; None for any other text."""
    match = _MATRIX.fullmatch(text)
    if match is None:
        return None
    lines = [line for line in match[3].split("¶") if line.strip()]
    matrix = matrix_of([[parse_cell(cell.strip()) for cell in line.split("&")] for line in lines])
    if matrix is None or match[1] is None:
        return matrix
    factor = parse("-1" if match[1] == "-" else match[1].removesuffix("*").strip())
    if factor is None or factor.variables() or factor.name == "sum" or text.startswith("- "):
        return None
    return MatrixRows(tuple(tuple(_multiplied(factor, cell) for cell in row) for row in matrix.rows), is_product=True)


def _multiplied(factor: ExpressionNode, cell: Answer) -> Number | Formula:
    name = cell.text if isinstance(cell, Words) else ""
    node = node_of(cell) if isinstance(cell, Number | Formula) else ExpressionNode("variable", value=name)
    product = as_quantity(ExpressionNode("product", (factor, node)))
    value = number_value(product)
    return Number((value,)) if isinstance(value, Fraction) else product


def matrix_of(rows: Sequence[Sequence[Answer | None]]) -> MatrixRows | None:
    """Return a matrix of complete rows of the same length; None if there is none."""
    if not rows or len({len(row) for row in rows}) > 1:
        return None
    complete = [tuple(cell for cell in row if isinstance(cell, Number | Formula | Words)) for row in rows]
    return MatrixRows(tuple(complete)) if all(len(row) == len(rows[0]) for row in complete) else None

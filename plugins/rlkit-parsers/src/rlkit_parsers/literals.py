"""Literals of Python that JSON can represent; the constants of JSON are understood."""

from __future__ import annotations

import ast

from rlkit.parsers.text import plain

_JSON_NAMES = {"true": True, "false": False, "null": None}


def read_literal(source: str) -> object:
    """Return the value of one of Python's literals that JSON can represent; `true`, `false` and `null` are understood.

    Raises:
        ValueError: It is none.
    """
    try:
        tree = ast.parse(source.strip(), mode="eval").body
        return literal(tree)
    except (TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("it is not a literal") from error


def literal(tree: ast.expr) -> object:
    """Return the value of a literal that JSON can represent.

    Raises:
        ValueError, TypeError, SyntaxError, MemoryError, RecursionError: It is none.
    """
    return plain(ast.literal_eval(_Literals().visit(tree)))


class _Literals(ast.NodeTransformer):
    """Replaces JSON's constants by Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node

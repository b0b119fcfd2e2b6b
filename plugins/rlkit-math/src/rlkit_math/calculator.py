"""A calculator, as a tool."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from rlkit.base.ranges import FiniteFloat
from rlkit.interfaces.tool import State, Tool, ToolReply

BINARY: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
UNARY: dict[type, Callable[[float], float]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
LONGEST = 200
LARGEST_EXACT = 2**53
"""Whole numbers beyond it are rounded in floating point."""


class Calculator(Tool):
    """Evaluates an arithmetic expression of numbers, + - * / // % and brackets.

    Args:
        bonus: The reward for a call that was answered, once a conversation.
        argument: What the expression is called in the schema.
    """

    name = "calculator"
    description = "Evaluates an arithmetic expression."

    def __init__(self, bonus: FiniteFloat = 0.0, argument: str = "expression") -> None:
        self.bonus = bonus
        self.argument = argument
        self.parameters = {
            "type": "object",
            "properties": {argument: {"type": "string", "description": "Such as (3 + 4) * 12."}},
            "required": [argument],
        }

    async def call(self, arguments: dict[str, object], state: State, **kwargs: object) -> ToolReply:
        value = evaluate(str(arguments[self.argument]))
        state["answered"] = True
        is_whole = isinstance(value, float) and value.is_integer() and abs(value) < LARGEST_EXACT
        return ToolReply(str(int(value) if is_whole else value))

    async def reward(self, state: State, **kwargs: object) -> float:
        return self.bonus if state.get("answered") else 0.0


def evaluate(expression: str) -> float:
    """Return the value of an expression.

    Raises:
        ValueError: It is not one, or too long.
        ZeroDivisionError: It divides by 0.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters, expected at most {LONGEST}")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError, OverflowError) as error:
        raise ValueError(
            f"{expression!r} is not an arithmetic expression, expected one such as (3 + 4) * 12"
        ) from error
    return value


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        return BINARY[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in UNARY:
        return UNARY[type(node.op)](_value(node.operand))
    raise ValueError(f"{ast.unparse(node)!r} is not allowed, expected numbers, + - * / // % and brackets")

"""Tools that come with rlkit."""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, cast

from rlkit.base.errors import PluginError
from rlkit.base.ranges import Count, FiniteFloat, Seconds
from rlkit.interfaces.content import json_content
from rlkit.interfaces.reward import as_number
from rlkit.interfaces.tool import Content, State, Tool, ToolReply

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime

__all__ = ["Calculator"]


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


class FunctionTool(Tool):
    """A function as a tool: the policy is shown its name, docstring and signature.

    A plain function runs in a worker process that is killed at the deadline; a coroutine function on the event loop.

    Args:
        timeout: Seconds for one call.
        concurrency: Calls at once; null for any number.
    """

    function: ClassVar[Callable[..., object]]

    def __init__(self, timeout: Seconds = 30.0, concurrency: Count | None = None) -> None:
        from transformers.utils import get_json_schema

        try:
            schema = get_json_schema(self.function)["function"]
        except Exception as error:  # it has several of its own
            raise PluginError(
                f"{type(self).__name__} cannot be a tool: {error}; annotate every argument with a type, and add a line "
                "under `Args:` in the docstring"
            ) from error
        self.name, self.description, self.parameters = schema["name"], schema["description"], schema["parameters"]
        self.timeout = timeout
        self.concurrency = concurrency

    def bind(self, runtime: Runtime) -> None:
        self._work = runtime.work

    async def call(self, arguments: dict[str, object], state: State, **kwargs: object) -> ToolReply | str:
        merged = arguments | kwargs
        if inspect.iscoroutinefunction(self.function):
            return _reply(await self.function(**merged))
        return ToolReply(*await self._work(_call, (type(self), merged), self.timeout))


def tool(function: Callable[..., object]) -> type[FunctionTool]:
    """Return a tool class for a function, to be registered by `rlkit_register`.

    The class takes the function's name and place, so that a recipe can name it: `tools: {add: my_package.add}`.
    """
    names = {"function": staticmethod(function), "__doc__": FunctionTool.__doc__, "__module__": function.__module__}
    return type(function.__name__, (FunctionTool,), names | {"__qualname__": function.__qualname__})


def _call(what: tuple[type[FunctionTool], dict[str, object]]) -> tuple[Content, float]:
    """Call the function in a worker, which returns only data."""
    cls, arguments = what
    reply = _reply(cls.function(**arguments))
    return cast(Content, json_content(reply.text)), as_number(reply.reward)


def _reply(answer: object) -> ToolReply:
    if isinstance(answer, ToolReply):
        return answer
    has_parts = isinstance(answer, list) and any(isinstance(part, dict) and "type" in part for part in answer)
    return ToolReply(cast(Content, answer) if has_parts else str(answer))

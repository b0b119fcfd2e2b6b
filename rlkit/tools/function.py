"""Tools from plain functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from rlkit.errors import PluginError
from rlkit.interfaces.reward import as_number
from rlkit.interfaces.tool import State, Tool, ToolReply
from rlkit.ranges import Count, Seconds

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime


class FunctionTool(Tool):
    """A function as a tool: its name, its docstring and its signature are what the policy is told.

    A plain function runs in a worker process that is killed at the deadline; a coroutine function on the event loop.

    Args:
        timeout: Seconds for one call.
        concurrency: Calls at once; null for any number.
    """

    function: ClassVar[Callable[..., Any]]

    def __init__(self, timeout: Seconds = 30.0, concurrency: Count | None = None) -> None:
        from transformers.utils import get_json_schema

        try:
            schema = get_json_schema(self.function)["function"]
        except Exception as error:  # it has several of its own
            raise PluginError(
                f"{type(self).__name__} cannot be a tool: {error}; give every argument a type, and a line under "
                "`Args:` in the docstring"
            ) from error
        self.name, self.description, self.parameters = schema["name"], schema["description"], schema["parameters"]
        self.timeout = timeout
        self.concurrency = concurrency

    def bind(self, runtime: Runtime) -> None:
        self._work = runtime.work

    async def call(self, arguments: dict[str, Any], state: State, **kwargs: Any) -> ToolReply | str:
        given = arguments | kwargs
        if inspect.iscoroutinefunction(self.function):
            return _reply(await self.function(**given))
        return ToolReply(*await self._work(_call, (type(self), given), self.timeout))


def tool(function: Callable[..., Any]) -> type[FunctionTool]:
    """Make a tool's class of a function, to be registered by `rlkit_register`.

    The class takes the function's name and place, so that a recipe can name it: `tools: {add: my_package.add}`.
    """
    names = {"function": staticmethod(function), "__doc__": FunctionTool.__doc__, "__module__": function.__module__}
    return type(function.__name__, (FunctionTool,), names | {"__qualname__": function.__qualname__})


def _call(what: tuple[type[FunctionTool], dict[str, Any]]) -> tuple[str, float]:
    """Call the function in a worker, from which only data comes back."""
    cls, arguments = what
    reply = _reply(cls.function(**arguments))
    return reply.text, as_number(reply.reward)


def _reply(answer: Any) -> ToolReply:
    return answer if isinstance(answer, ToolReply) else ToolReply(str(answer))

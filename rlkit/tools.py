"""Tools of Python functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, cast

from rlkit.base.errors import PluginError
from rlkit.base.ranges import Count, Seconds
from rlkit.interfaces.content import json_content
from rlkit.interfaces.reward import as_number
from rlkit.interfaces.tool import Content, State, Tool, ToolReply
from rlkit.registry.shelf import attribute_of

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime

__all__: list[str] = []

__getattr__ = attribute_of("tools")


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

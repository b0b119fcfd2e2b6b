"""An agent that is a function in Python."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Awaitable, Callable, Sequence

from rlkit.agents import write_task
from rlkit.base.errors import RecipeError, explain
from rlkit.base.functions import load_function, missing_function, module_level, require_function
from rlkit.base.names import OutputPath
from rlkit.base.ranges import Seconds
from rlkit.interfaces.agent import Agent, AgentClient, AgentResult, AgentTask
from rlkit.interfaces.runtime import Runtime

Function = Callable[[AgentClient, AgentTask], Awaitable[object]]


class PythonAgent(Agent):
    """Awaits a function `run(client, task)` on the run's event loop, in the trainer's process.

    `client.chat(messages, tools)` returns the policy's next message; `client.url`, `client.key` and `client.model` are
    for the client of a provider: OpenAI's takes `client.url` with `/v1` behind it. `task.prompt.messages` is the task,
    `task.text` its text, `task.folder` a folder of the rollout's own. What the function returns is the agent's output;
    if it raises, the exit status is 1.

    Args:
        function: `file.py:name` or `package.module:name` of a coroutine function.
        allow_code: Must be true, since the recipe runs the function's code.
        timeout: Seconds for one rollout, without the time in which the engine samples.
        keep: A folder to which the rollouts' folders are moved after scoring; null removes them.
    """

    def __init__(
        self,
        function: str,
        allow_code: bool = False,
        *,
        timeout: Seconds = 600.0,
        keep: OutputPath | None = None,
    ) -> None:
        self.allow_code = allow_code
        require_function("PythonAgent", function, self.allow_code)
        problem = _coroutine_problem(function, ("client", "task"))
        if problem is not None:
            raise RecipeError(f"PythonAgent has function={function!r}, but {problem}")
        self.function = function
        self.timeout = timeout
        self.keep = keep
        self._loaded: Function | None = None

    def bind(self, runtime: Runtime) -> None:
        self._loaded = _load(self.function)

    async def run(self, task: AgentTask, client: AgentClient) -> AgentResult:
        assert self._loaded is not None
        write_task(task)
        value = await self._loaded(client, task)
        return value if isinstance(value, AgentResult) else AgentResult(0, "" if value is None else str(value))


def _load(function: str) -> Function:
    """Return the function that a recipe names.

    Raises:
        RecipeError: There is none, or it is no coroutine function.
    """
    loaded = load_function(function)
    if not inspect.iscoroutinefunction(loaded):
        raise RecipeError(f"PythonAgent has function={function!r}, expected `async def` of (client, task)")
    return loaded


def _coroutine_problem(function: str, arguments: Sequence[str]) -> str | None:
    """Explain why a function is no coroutine function that takes arguments by position; None if it may be one.

    Args:
        function: As `require_function` has accepted it; the packages of a module, but not itself, are imported.
        arguments: Their names.
    """
    module, _, name = function.rpartition(":")
    path: str | None = module
    if not module.endswith(".py"):
        try:
            spec = importlib.util.find_spec(module)
        except Exception as error:  # importing foreign packages may raise anything
            return f"{module} cannot be found: {explain(error)}"
        if spec is None:
            return f"there is no module {module!r}"
        path = spec.origin
        problem = missing_function(f"{path}:{name}")
        if problem is not None:
            return problem
    if path is None or not path.endswith(".py"):
        return None
    expected = f"expected `async def {name}({', '.join(arguments)})`"
    try:
        with open(path, "rb") as file:
            nodes = list(module_level(ast.parse(file.read())))
    except (OSError, RecursionError):  # reported when the file is loaded
        return None
    definitions = [node for node in nodes if getattr(node, "name", None) == name]
    if len(definitions) != 1 or getattr(definitions[0], "decorator_list", None):  # only running the file shows which
        return None
    definition = definitions[0]
    if isinstance(definition, ast.FunctionDef | ast.ClassDef):
        return f"{name} is no coroutine function, {expected}"
    if isinstance(definition, ast.AsyncFunctionDef) and not _takes(definition.args, len(arguments)):
        return f"its arguments are ({ast.unparse(definition.args)}), {expected}"
    return None


def _takes(signature: ast.arguments, count: int) -> bool:
    """Whether a function can be called with so many arguments by position."""
    positional = len(signature.posonlyargs) + len(signature.args)
    required = positional - len(signature.defaults)
    enough = required <= count and (count <= positional or signature.vararg is not None)
    return enough and all(default is not None for default in signature.kw_defaults)

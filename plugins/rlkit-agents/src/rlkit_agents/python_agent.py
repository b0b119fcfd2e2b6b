"""An agent that is a function in Python."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable

from rlkit.agents import write_task
from rlkit.base.errors import RecipeError
from rlkit.base.functions import coroutine_problem, load_function, require_function
from rlkit.base.names import OutputPath
from rlkit.base.ranges import Seconds
from rlkit.interfaces.agent import Agent, AgentClient, AgentResult, AgentTask
from rlkit.interfaces.runtime import Runtime

Function = Callable[[AgentClient, AgentTask], Awaitable[object]]


class PythonAgent(Agent):
    """Awaits a function `run(client, task)` on the run's event loop, in the trainer's process.

    `client.chat(messages, tools)` returns the policy's next message; `client.url`, `client.key` and `client.model` are
    for the client of a provider. `task.text` is the task, `task.folder` a folder of the rollout's own. What the
    function returns is the agent's output; if it raises, the exit status is 1.

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
        problem = coroutine_problem(function, ("client", "task"))
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

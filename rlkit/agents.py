"""Agents that come with rlkit: a command, and a function in Python."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

from rlkit.base.command import (
    Command,
    CommandLimits,
    check_files,
    environment_of_run,
    require_allowed,
    workdir_of,
    write_files,
)
from rlkit.base.errors import RecipeError
from rlkit.base.functions import coroutine_problem, load_function, require_function
from rlkit.base.names import OutputPath
from rlkit.base.ranges import Count, PositiveInt, Seconds
from rlkit.base.text import HIDDEN
from rlkit.interfaces.agent import Agent, AgentClient, AgentResult, AgentTask
from rlkit.interfaces.runtime import Runtime

__all__ = ["CommandAgent", "PythonAgent"]

TASK_FILE = "TASK.md"
SECRET_LENGTH = 8
"""Fewest characters of a variable's value that is hidden in the output of a command."""
LOCAL_HOSTS = "127.0.0.1,localhost"

Function = Callable[[AgentClient, AgentTask], Awaitable[object]]


class CommandAgent(Agent):
    """Runs a command in a folder of its own, with the policy's address and the task in its environment.

    The command is split as a shell splits it, but no shell runs it. `{task}`, `{url}`, `{key}` and `{model}` in its
    words are replaced. It has OPENAI_BASE_URL, ANTHROPIC_BASE_URL, OPENAI_API_KEY, ANTHROPIC_API_KEY, RLKIT_MODEL and
    RLKIT_TASK, a file TASK.md with the task's text, the prompt's pictures as picture-1.png and so on, and the files in
    the row's column `files`, texts by path. HOME is the folder. The exit status and the end of its output are scored
    with the rollout.

    In its sandbox it may write to its folder, /tmp and /dev/shm, read the system and this Python, reach the policy, and
    see its own processes only. The row's column `workdir` is a path at which it finds its folder too, and begins there.

    Args:
        command: The command line. Files that it names are readable.
        allow_code: Must be true, since the recipe runs the command.
        environment: Environment variables besides; values of 8 characters or more are hidden in its output.
        timeout: Seconds for one rollout, without the time in which the engine samples.
        memory_mb: Memory of all its processes together.
        processes: Processes at once.
        file_mb: Size of a file that it writes.
        disk_mb: Size of its folder.
        sandbox: Confine it, or refuse a machine that cannot; false gives it the user's rights and network.
        readable: Files and folders that it may read in its sandbox.
        keep: A folder to which its files are moved after scoring; null removes them.
    """

    def __init__(
        self,
        command: str,
        allow_code: bool = False,
        *,
        environment: dict[str, str] | None = None,
        timeout: Seconds = 600.0,
        memory_mb: PositiveInt = 4096,
        processes: Count = 128,
        file_mb: PositiveInt = 256,
        disk_mb: PositiveInt = 1024,
        sandbox: bool = True,
        readable: Sequence[str] = (),
        keep: OutputPath | None = None,
    ) -> None:
        self.allow_code = allow_code
        require_allowed("CommandAgent", command, self.allow_code)
        self.memory_mb = memory_mb
        self.processes = processes
        self.file_mb = file_mb
        self.disk_mb = disk_mb
        self.sandbox = sandbox
        self.readable = readable
        limits = CommandLimits(self.memory_mb, self.processes, self.file_mb, self.disk_mb)
        self.command = Command("CommandAgent", command, limits, confined=self.sandbox, readable=self.readable)
        self.environment = dict(environment or {})
        self.timeout = timeout
        self.keep = keep

    def bind(self, runtime: Runtime) -> None:
        self.command.check()

    async def run(self, task: AgentTask, client: AgentClient) -> AgentResult:
        _write_task(task)
        values = {"{task}": task.text, "{url}": client.url, "{key}": client.key, "{model}": client.model}
        port = urlsplit(client.url).port or 0
        mounts = workdir_of(task.prompt.meta, task.folder)
        result = await self.command.run(task.folder, self.variables(task, client), values, port, mounts)
        return AgentResult(result.status, self._without_values(result.output))

    def _without_values(self, output: str) -> str:
        """Return an output without the values of `environment`, which may be credentials."""
        for value in self.environment.values():
            output = output.replace(value, HIDDEN) if len(value) >= SECRET_LENGTH else output
        return output

    def variables(self, task: AgentTask, client: AgentClient) -> dict[str, str]:
        """Return the environment variables of the command."""
        own = {
            "HOME": str(task.folder),
            "OPENAI_BASE_URL": f"{client.url}/v1",
            "OPENAI_API_BASE": f"{client.url}/v1",
            "OPENAI_API_KEY": client.key,
            "ANTHROPIC_BASE_URL": client.url,
            "ANTHROPIC_API_KEY": client.key,
            "RLKIT_MODEL": client.model,
            "RLKIT_TASK": task.text.replace("\0", ""),
            "RLKIT_SEED": str(task.seed),
            "no_proxy": LOCAL_HOSTS,
            "NO_PROXY": LOCAL_HOSTS,
        }
        return environment_of_run() | own | self.environment


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
        _write_task(task)
        value = await self._loaded(client, task)
        return value if isinstance(value, AgentResult) else AgentResult(0, "" if value is None else str(value))


def _write_task(task: AgentTask) -> None:
    """Write the files of its row, and the task's text and pictures, into its folder.

    Raises:
        ValueError: A path leads out of the folder, or a file is no text.
    """
    write_files(task.folder, {**check_files(task.prompt.meta.get("files"), "files"), TASK_FILE: task.text})
    for number, picture in enumerate(task.pictures, 1):
        (task.folder / f"picture-{number}{picture.suffix}").write_bytes(picture.data)


def _load(function: str) -> Function:
    """Return the function that a recipe names.

    Raises:
        RecipeError: There is none, or it is no coroutine function.
    """
    loaded = load_function(function)
    if not inspect.iscoroutinefunction(loaded):
        raise RecipeError(f"PythonAgent has function={function!r}, expected `async def` of (client, task)")
    return loaded

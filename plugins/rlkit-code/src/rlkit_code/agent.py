"""An agent that is a command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from rlkit.agents import write_task
from rlkit.base.files import no_such
from rlkit.base.names import OutputPath
from rlkit.base.ranges import Count, PositiveInt, Seconds
from rlkit.base.text import HIDDEN
from rlkit.interfaces.agent import Agent, AgentClient, AgentResult, AgentTask
from rlkit.interfaces.runtime import Runtime
from rlkit.types import Prompt
from rlkit_code.command import Command, CommandLimits, environment_of_run, require_allowed, workdir_of

SECRET_LENGTH = 8
"""Fewest characters of a variable's value that is hidden in the output of a command."""
LOCAL_HOSTS = "127.0.0.1,localhost"


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

    def refuses(self, prompt: Prompt) -> str | None:
        files = prompt.meta.get("files")
        script = self.command.missing(files if isinstance(files, Mapping) else ())
        if script is None:
            return None
        return f"agent.command names {script!r}, {no_such(script)}; nor is it in the row's column `files`"

    def bind(self, runtime: Runtime) -> None:
        self.command.check()

    async def run(self, task: AgentTask, client: AgentClient) -> AgentResult:
        write_task(task)
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

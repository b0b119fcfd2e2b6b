"""A reward that runs a command: a repository's tests, or any other verifier."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rlkit.base.deadlines import slot
from rlkit.base.errors import RolloutError
from rlkit.base.files import open_inside
from rlkit.base.folders import check_files, write_files
from rlkit.base.names import NumberFile
from rlkit.base.ranges import Count, PositiveInt, Seconds
from rlkit.interfaces.reward import OnError, RewardManager, as_score
from rlkit.interfaces.runtime import Runtime
from rlkit.types import Prompt, Score, Trajectory
from rlkit_code.command import Command, CommandLimits, environment_of_run, require_allowed, temporary_folder, workdir_of

COMPLETION_FILE = "COMPLETION.txt"
LONGEST_NUMBER = 100


class CommandReward(RewardManager):
    """1 if a command ends with exit status 0, else 0; or a number that it writes.

    After a rollout of an agent the command runs in the agent's folder, otherwise in a new folder with the files of the
    row's column `files` and the policy's last turn as COMPLETION.txt. The files of the column `tests` are written
    before, over those of the same names: no completion has read or changed them. Those at absolute paths, such as
    `/tests/test.sh`, are outside of the folder. The column `workdir` is a path at which the folder is too.

    The command is split as a shell splits it, but no shell runs it. It has a sandbox without network: it writes to its
    folder and to those of absolute paths. A command that exceeds `seconds` earns 0, since completions may hang.

    Args:
        command: The command line. Files that it names are readable.
        allow_code: Must be true, since the recipe runs the command, and it may run what the policy wrote.
        number: A file into which the command writes the reward as a number; a file that is missing or no number is 0.
            Null for the exit status.
        seconds: Time of one command.
        memory_mb: Memory of all its processes together.
        processes: Processes at once.
        disk_mb: Size of its folder.
        sandbox: Confine it, or refuse a machine that cannot; false gives it the user's rights and network.
        readable: Files and folders that it may read in its sandbox.
        concurrency: Most commands at once; null for the number of CPUs.
        timeout: Seconds for the samples of one prompt, without the wait for others' commands to end.
        on_error: What happens to a group with a failed score.
    """

    def __init__(
        self,
        command: str,
        allow_code: bool = False,
        *,
        number: NumberFile | None = None,
        seconds: Seconds = 60.0,
        memory_mb: PositiveInt = 2048,
        processes: Count = 64,
        disk_mb: PositiveInt = 512,
        sandbox: bool = True,
        readable: Sequence[str] = (),
        concurrency: Count | None = None,
        timeout: Seconds = 1800.0,
        on_error: OnError = "drop",
    ) -> None:
        self.allow_code = allow_code
        require_allowed("CommandReward", command, self.allow_code)
        self.number = number
        self.seconds = seconds
        self.memory_mb = memory_mb
        self.processes = processes
        self.disk_mb = disk_mb
        self.sandbox = sandbox
        self.readable = readable
        limits = CommandLimits(self.memory_mb, self.processes, self.disk_mb, self.disk_mb)
        self.command = Command("CommandReward", command, limits, confined=self.sandbox, readable=self.readable)
        self.concurrency = concurrency
        self.timeout = timeout
        self.on_error = on_error
        self.components = ("accuracy",) if number is None else ()

    def bind(self, runtime: Runtime) -> None:
        self.command.check()
        self._slots = asyncio.Semaphore(self.concurrency or os.cpu_count() or 1)

    def unscorable(self, prompt: Prompt) -> str | None:
        try:
            check_files(prompt.meta.get("files"), "files")
            check_files(prompt.meta.get("tests"), "tests", rooted=True)
        except ValueError as error:
            return f"cannot be verified: {error}"
        return None

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        return list(await asyncio.gather(*map(self._score, trajectories)))

    async def _score(self, trajectory: Trajectory) -> Score:
        try:
            async with slot(self._slots), self._workspace(trajectory) as (folder, root):
                mounts = workdir_of(trajectory.prompt.meta, folder) | {f"/{path.name}": path for path in root.iterdir()}
                status = await self._run(folder, mounts)
                if self.number is not None:
                    absolute = self.number.startswith("/")
                    return read_number(root if absolute else folder, self.number.lstrip("/"))
        except (OSError, RolloutError, ValueError) as error:
            return Score(None, error=f"CommandReward: {error}")
        passed = float(status == 0)
        return Score(passed, {"accuracy": passed})

    @asynccontextmanager
    async def _workspace(self, trajectory: Trajectory) -> AsyncIterator[tuple[Path, Path]]:
        """Offer the folder of an agent's rollout, or a new one, and what is at absolute paths, with the row's files."""
        row, agent_folder = trajectory.prompt.meta, trajectory.agent.get("folder")
        files = check_files(row.get("tests"), "tests", rooted=True) | ({} if self.number is None else {self.number: ""})
        async with temporary_folder("rlkit-reward-") as parent:
            root = parent / "root"
            root.mkdir()
            folder = parent / "folder" if agent_folder is None else Path(agent_folder)
            if not os.path.isdir(folder):
                folder = parent / "folder"
                folder.mkdir()
                files = check_files(row.get("files"), "files") | {COMPLETION_FILE: trajectory.text} | files
            relative = {name: text for name, text in files.items() if not name.startswith("/")}
            absolute = {name.lstrip("/"): text for name, text in files.items() if name.startswith("/")}
            await asyncio.to_thread(write_files, folder, relative)
            await asyncio.to_thread(write_files, root, absolute)
            yield folder, root

    async def _run(self, folder: Path, mounts: Mapping[str, Path]) -> int:
        """Return the exit status; -9 beyond the time."""
        environment = environment_of_run() | {"HOME": str(folder)}
        try:
            async with asyncio.timeout(self.seconds):
                return (await self.command.run(folder, environment, mounts=mounts)).status
        except TimeoutError:
            return -9


def read_number(folder: Path, name: str) -> Score:
    """Return the number in a regular file of a command's folder as a score; 0 if there is none."""
    try:
        with open_inside(folder, name) as file:
            score = as_score(float(file.read(LONGEST_NUMBER)))
    except (OSError, ValueError):
        return Score(0.0)
    return score if score.error is None else Score(0.0)

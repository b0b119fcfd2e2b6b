"""Commands that a recipe names: started under a supervisor, within limits, and killed with all their descendants."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import platform
import random
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rlkit.base.errors import RecipeError, RolloutError, show
from rlkit.base.folders import remove
from rlkit_code import attempts, sandbox

ROOT = Path(__file__).parents[1]
"""The folder from which this package is imported."""
SUPERVISOR = (
    *(sys.executable, "-I", "-S", "-B", "-c"),
    "import sys; sys.path.insert(0, sys.argv[1]); from rlkit_code.supervisor import main; main()",
    str(ROOT),
)
INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Environment variables of the run that a command has too; tokens and passwords are not among them."""
SYSTEM = (
    "/sbin", "/lib32", "/etc/alternatives", "/etc/hosts", "/etc/localtime", "/etc/nsswitch.conf", "/etc/ssl/certs",
)  # fmt: skip
"""What a confined command may read, besides what `sandbox.readable` lists."""
SCRIPT = re.compile(r"(?![/~])[^\s{]+\.(py|sh|js|mjs|ts|rb|pl)")
"""The relative path of one, without names in braces."""
INTERPRETER = re.compile(r"python[\d.]*|(ba|z|da)?sh|node|ruby|perl")
INLINE = ("-c", "-e", "-m", "-")
"""Options of interpreters, after which no script follows."""
VIEW = ("/tmp", "/dev", "/proc", "/sys", "/run")
"""Paths that are a sandbox's own, or have no meaning in one."""
USERS = range(61184, 65520)
"""User ids that belong to nobody; systemd assigns them to services without a user."""
KILL_SECONDS = 10.0
PROBE_SECONDS = 30.0

_users = itertools.cycle(random.Random().sample(USERS, len(USERS)))


def next_user() -> int | None:
    """Return a user for code to become, where rlkit runs as root."""
    return next(_users) if os.geteuid() == 0 else None


def require_allowed(part: str, line: str, allow_code: bool) -> None:
    """Check that the recipe allows a part to run its command.

    Raises:
        RecipeError: It does not.
    """
    if not allow_code:
        raise RecipeError(f"{part} has the command {show(line)}, which would run; set allow_code: true if you trust it")


@dataclass(frozen=True)
class CommandLimits:
    """What the processes of a command may use.

    Args:
        memory_mb: Memory of all processes together.
        processes: Processes at once.
        file_mb: Size of a file.
        disk_mb: Size of the folder.
        output_bytes: The end of the output that is returned.
    """

    memory_mb: int
    processes: int
    file_mb: int
    disk_mb: int
    output_bytes: int = 2**16


@dataclass(frozen=True)
class CommandResult:
    """How a command ended.

    Args:
        status: Exit status, 128 and more for a signal, negative if it was killed.
        output: The end of what it wrote.
    """

    status: int
    output: str


class Command:
    """A command line, split as a shell splits it; no shell runs it.

    Args:
        owner: The part whose option it is, for messages.
        line: The command line.
        limits: What it may use.
        confined: Run it in a sandbox: its folder and nothing else to write to, no other processes, no network.
        readable: Files and folders that it may read there, besides the system and this Python.

    Raises:
        RecipeError: It cannot be split, or what is to be readable does not exist.
    """

    def __init__(
        self, owner: str, line: str, limits: CommandLimits, *, confined: bool, readable: Sequence[str] = ()
    ) -> None:
        try:
            self.words = shlex.split(line)
        except ValueError as error:
            raise RecipeError(f"{owner} has command={show(line)}, which no shell can split: {error}") from error
        if not self.words:
            raise RecipeError(f"{owner} has an empty command")
        for path in readable:
            if not os.path.exists(path):
                raise RecipeError(f"{owner} has readable={show(path)}, which does not exist")
        self.owner = owner
        self.limits = limits
        self.confined = confined
        arguments = self.words if os.sep in self.words[0] else self.words[1:]
        files = {word: os.path.abspath(word) for word in arguments if os.path.isfile(word)}
        self._files = {word: path for word, path in files.items() if not within(path, _system())}
        self.readable = [*_system(), *map(os.path.abspath, readable), *self._files.values()]
        program = shutil.which(self.words[0], path=environment_of_run()["PATH"])
        if confined and program and not within(os.path.abspath(program), self.readable):
            raise RecipeError(
                f"{owner} runs {program}, which it cannot read in its sandbox; add its folder to `readable`"
            )

    def missing(self, provided: Collection[str]) -> str | None:
        """Return the script that the command runs if it is neither here nor provided; others it may write itself."""
        script = self.words[0]
        if INTERPRETER.fullmatch(os.path.basename(script)):
            script = next((word for word in self.words[1:] if word in INLINE or not word.startswith("-")), "")
        is_here = script in self._files or os.path.normpath(script) in map(os.path.normpath, provided)
        return None if is_here or not SCRIPT.fullmatch(script) else script

    def filled(self, folder: Path, values: Mapping[str, str]) -> list[str]:
        """Return the words with names in braces replaced; files that the folder has not are those of the recipe."""
        words = [
            self._files[word] if word in self._files and not os.path.lexists(folder / word) else word
            for word in self.words
        ]
        return [fill(word, values) for word in words]

    async def run(
        self,
        folder: Path,
        environment: Mapping[str, str],
        values: Mapping[str, str] | None = None,
        port: int = 0,
        mounts: Mapping[str, Path] | None = None,
    ) -> CommandResult:
        """Run the command in a folder until it ends; cancelled, it is killed with all that it has started.

        Args:
            folder: Its folder, in which afterwards are only files, folders, and links that lead nowhere else.
            environment: All its environment variables.
            values: Texts by the names in the words that they replace.
            port: Of this machine, that a confined command may reach.
            mounts: Folders by the paths at which a confined command finds them too, and may write to them; it begins
                at the path of its own folder, if there is one.

        Raises:
            RolloutError: It cannot be confined, or a path is the system's.
        """
        self._check_mounts(mounts or {}, folder)
        process = await asyncio.create_subprocess_exec(
            *SUPERVISOR,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=dict(environment),
            start_new_session=True,
            limit=2**20,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(self._spec(self.filled(folder, values or {}), folder, port, mounts or {}))
        reading = asyncio.ensure_future(process.stdout.read())
        try:
            report = await asyncio.shield(reading)
            await process.wait()
        finally:
            process.stdin.close()  # the supervisor kills what is left
            try:
                async with asyncio.timeout(KILL_SECONDS):
                    await process.wait()
            except TimeoutError:
                process.kill()
            reading.cancel()
        result = self._result(report)
        if isinstance(result, str):
            raise RolloutError(result)
        return result

    def check(self) -> None:
        """Try out whether the machine confines the command, if it is to be confined.

        Raises:
            RecipeError: A protection is missing; the message says which.
        """
        if not self.confined:
            return
        with machine() as (parent, marker, port, pid):
            code = f"{Path(attempts.__file__).read_text(encoding='utf-8')}\nreport({marker!r}, {port}, {pid})\n"
            folder = parent / "folder"
            folder.mkdir()
            spec = self._spec([sys.executable, "-I", "-B", "-c", code], folder, 0, {})
            result = self._result(_run_now(spec))
        if isinstance(result, str):
            raise RecipeError(result)
        try:
            missing = json.loads(result.output)
        except ValueError as error:
            raise RecipeError(f"{self.owner} cannot run Python in its sandbox, which says: {result.output}") from error
        if missing:
            raise RecipeError(self._unprotected(f"its command would reach {', '.join(missing)} of this machine"))

    def _check_mounts(self, mounts: Mapping[str, Path], folder: Path) -> None:
        if mounts and not self.confined:
            raise RolloutError(f"{self.owner} has no sandbox, in which a folder could be {', '.join(mounts)}")
        for path in mounts:
            clean = path.startswith("/") and os.path.normpath(path) == path.rstrip("/") and path.isprintable()
            taken = [other for other in (*self.readable, *VIEW, str(folder)) if _overlap(path, other)]
            if not clean or taken:
                problem = f"overlaps {taken[0]}" if taken else "is no absolute path"
                raise RolloutError(f"{self.owner} cannot have a folder at {show(path)} in its sandbox, which {problem}")

    def _spec(self, words: Sequence[str], folder: Path, port: int, mounts: Mapping[str, Path]) -> bytes:
        spec = {"command": list(words), "folder": str(folder), "readable": self.readable, **asdict(self.limits)}
        spec["sandbox"] = {
            "view": f"{folder}.view",
            "user": next_user(),
            "port": port or None,
            "mounts": {path: str(source) for path, source in mounts.items()},
        }
        return json.dumps(spec if self.confined else spec | {"sandbox": None}).encode() + b"\n"

    def _result(self, report: bytes) -> CommandResult | str:
        """Return the command's end, or the reason why it did not begin, from the supervisor's report."""
        try:
            fields = json.loads(report)
        except ValueError:
            return CommandResult(-9, "the command's supervisor was killed")
        if fields["problem"] is not None:
            return self._unprotected(str(fields["problem"]))
        return CommandResult(int(fields["status"]), str(fields["output"]))

    def _unprotected(self, problem: str) -> str:
        if sys.platform != "linux" or platform.machine() not in sandbox.MACHINES:
            problem = f"this is {sys.platform} on {platform.machine()}"
        return (
            f"{self.owner} cannot confine its command: {problem}. Use Linux on {' or '.join(sandbox.MACHINES)} and "
            "allow user namespaces; or, if you trust the command, accept it with sandbox: false"
        )


@contextmanager
def machine() -> Iterator[tuple[Path, str, int, int]]:
    """Offer what a sandbox has to protect: a new folder, a file in it, a port and a process."""
    with (
        tempfile.TemporaryDirectory(prefix="rlkit-probe-") as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
        subprocess.Popen(("sleep", str(PROBE_SECONDS))) as sleeper,
    ):
        marker = Path(folder, "marker")
        marker.touch()
        try:
            yield Path(folder), str(marker), server.getsockname()[1], sleeper.pid
        finally:
            sleeper.kill()


def environment_of_run() -> dict[str, str]:
    """Return the environment variables that a command inherits; its `python` is the one that runs rlkit."""
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    return inherited | {"PATH": os.pathsep.join((os.path.dirname(sys.executable), inherited.get("PATH", os.defpath)))}


def fill(word: str, values: Mapping[str, str]) -> str:
    """Return a word with the names in it replaced; the values are not searched for names."""
    if not values:
        return word
    names = re.compile("|".join(map(re.escape, values)))
    return names.sub(lambda match: values[match.group()], word).replace("\0", "")


@asynccontextmanager
async def temporary_folder(prefix: str) -> AsyncIterator[Path]:
    """Offer a new folder, and remove it with all that a command has left there."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    finally:
        await asyncio.to_thread(remove, folder)


def workdir_of(row: Mapping[str, object], folder: Path) -> dict[str, Path]:
    """Return the mount of a command's folder at the path in the row's column `workdir`, if there is one.

    Raises:
        ValueError: It is no text.
    """
    path = row.get("workdir")
    if not isinstance(path, str | None):
        raise ValueError(f"the row's workdir is {show(path)}, expected an absolute path")
    return {} if path is None else {path: folder}


def _run_now(spec: bytes) -> bytes:
    """Run a supervisor to its end; return its report."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(SUPERVISOR, start_new_session=True, env=environment_of_run(), **pipes) as process:  # type: ignore[call-overload]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(spec)
        process.stdin.flush()
        report: bytes = process.stdout.read()
        with suppress(BrokenPipeError):
            process.stdin.close()
    return report


def _system() -> list[str]:
    """Return the paths that every confined command may read."""
    return [*sandbox.readable(), *filter(os.path.exists, SYSTEM)]


def _overlap(path: str, other: str) -> bool:
    """Whether two paths are equal, or the folder at one holds the other."""
    return within(path, [other]) or within(other, [path])


def within(path: str, folders: Sequence[str]) -> bool:
    """Whether a path is, or is in, any of folders."""
    return any(path == folder or path.startswith(folder.rstrip(os.sep) + os.sep) for folder in folders)

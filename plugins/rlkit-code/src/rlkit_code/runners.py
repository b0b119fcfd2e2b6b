"""What runs the program of a completion: the sandbox of this machine, or a Sandbox Fusion service."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rlkit.base.deadlines import slot
from rlkit.base.errors import RecipeError, RolloutError, shorten, show
from rlkit.base.folders import write_files
from rlkit.base.retry import (
    LONGEST_PAUSE,
    MAX_QUOTED,
    HttpClient,
    OversizedError,
    RetryPolicy,
    ServiceError,
    require_http,
)
from rlkit_code.cases import Case
from rlkit_code.command import ROOT, Command, CommandLimits, environment_of_run, temporary_folder, within
from rlkit_code.grader import COMPILE_ERROR, TESTS, same_text
from rlkit_code.program import PROGRAM

GRADER = "import sys; sys.path.insert(0, sys.argv[1]); from rlkit_code.grader import main; main()"
GRADER_MB = 128
"""Memory of the grader and of the processes that confine it."""
PROCESSES = 64
DISK_MB = 256
GRACE_SECONDS = 10.0
"""Between a deadline of the grader or the service and its end by force."""
SINGLE_THREADED = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
NOT_STARTED = 127
"""Exit status of a command that is not started; the grader never has it."""
RETRIES = 3
BLAMED = (None, 500)
"""HTTP statuses of failures that a program may cause; None where there is no response, or none that can be used."""
REQUESTS = 64
"""To a service at once, unless the recipe says how many."""


class Language(NamedTuple):
    """A language of programs on this machine.

    Args:
        file: Name of the program's file.
        compiler: Words that compile it, or check its syntax; the grader itself does that for Python.
        command: Words that run it.
        package: What has the compiler.
        memory_mb: What the compiler needs.
    """

    file: str
    compiler: tuple[str, ...]
    command: tuple[str, ...]
    package: str = ""
    memory_mb: int = 1


LANGUAGES = {
    "python": Language(PROGRAM, (), (sys.executable, "-B", PROGRAM)),
    "cpp": Language(
        "program.cpp", ("g++", "-std=c++17", "-O2", "-pipe", "-o", "program", "program.cpp"), ("./program",), "g++", 512
    ),
    "javascript": Language("program.js", ("node", "--check", "program.js"), ("node", "program.js"), "nodejs", 128),
    "bash": Language("program.sh", ("bash", "-n", "program.sh"), ("bash", "program.sh"), "bash"),
}
RESERVING = {name: name for name in ("csharp", "java", "kotlin_script", "scala", "typescript")} | {
    "javascript": "nodejs"
}
"""Languages whose programs reserve more addresses than they use, which is what a service limits; by its names."""
SERVED = (
    {name: name for name in ("bash", "cpp", "go", "julia", "lua", "perl", "php", "python", "racket", "ruby", "rust")}
    | {"r": "R", "swift": "swift"}
    | RESERVING
)
"""Languages of Sandbox Fusion whose programs read standard input, by its names."""
ALIASES = {"c++": "cpp", "js": "javascript", "node": "javascript", "nodejs": "javascript", "python3": "python"}


@dataclass(frozen=True)
class Rules:
    """How programs are tested: options of `CodeReward`, and `stop`, whether the first failure ends the tests."""

    seconds: float
    compile_seconds: float
    total_seconds: float
    memory_mb: int
    tolerance: float
    stop: bool


class Tests(NamedTuple):
    """The tests of a row: their language, the cases, and the code before assertions."""

    language: str
    cases: list[Case]
    setup: str


def read_language(name: object, languages: Iterable[str]) -> str:
    """Return the name of a language, as a recipe or a row has it, in this module's spelling.

    Raises:
        ValueError: It is none of the languages.
    """
    language = name.strip().lower() if isinstance(name, str) else ""
    language = ALIASES.get(language, language)
    if language not in languages:
        raise ValueError(f"language {show(name)}, expected {', '.join(sorted(languages))}")
    return language


class SandboxRunner:
    """Runs programs in the sandbox of this machine, where a grader of its own has the tests.

    Args:
        rules: Limits.
        confined: Whether there is a sandbox.
        concurrency: Most programs at once; None for the number of CPUs.
    """

    languages = LANGUAGES

    def __init__(self, rules: Rules, confined: bool, concurrency: int | None) -> None:
        self.rules = rules
        self.concurrency = concurrency or os.cpu_count() or 1
        line = shlex.join([sys.executable, "-I", "-B", "-c", GRADER, str(ROOT)])
        limits = CommandLimits(rules.memory_mb + GRADER_MB, PROCESSES, DISK_MB, DISK_MB)
        self.command = Command("CodeReward", line, limits, confined=confined, readable=[str(ROOT / "rlkit_code")])

    def lacks(self, tests: Tests) -> str | None:
        """Return the requirement of these tests that cannot be met; None if all can."""
        language = LANGUAGES[tests.language]
        if tests.language != "python" and not all("input" in case for case in tests.cases):
            return "tests with inputs and outputs; calls and assertions are for Python"
        if self.rules.memory_mb < language.memory_mb:
            return f"memory_mb of at least {language.memory_mb}, which is {self.rules.memory_mb}"
        program = (language.compiler or language.command)[0]
        path = shutil.which(program, path=environment_of_run()["PATH"])
        if path is None:
            return f"{program}, which is not installed; apt-get install {language.package}"
        if self.command.confined and not within(os.path.realpath(path), self.command.readable):
            return f"{program}, which is {path}, out of the sandbox's reach; install it in /usr"
        return None

    def bind(self) -> None:
        """Check the sandbox, and prepare to run programs."""
        self.command.check()
        self._slots = asyncio.Semaphore(self.concurrency)

    async def run(self, program: str, tests: Tests) -> str:
        """Return the verdicts of the grader, which may have been killed on the way.

        Raises:
            RolloutError: The program cannot be confined, or the grader does not start.
            OSError: There is no room for its files.
        """
        language = LANGUAGES[tests.language]
        spec = {"cases": tests.cases, "setup": tests.setup, "compiler": language.compiler, "command": language.command}
        rules = self.rules
        async with slot(self._slots), temporary_folder("rlkit-reward-") as parent:
            folder = parent / "folder"
            folder.mkdir()
            await asyncio.to_thread(_write, folder, {language.file: program}, asdict(rules) | spec)
            environment = environment_of_run() | SINGLE_THREADED | {"HOME": str(folder), "PYTHONHASHSEED": "0"}
            try:
                async with asyncio.timeout(rules.compile_seconds + rules.total_seconds + GRACE_SECONDS):
                    result = await self.command.run(folder, environment)
            except TimeoutError:
                return ""
        verdicts = result.output.partition("\n")[0]
        if result.status == NOT_STARTED:
            raise RolloutError(f"the grader did not start: {verdicts}")
        return verdicts


def _write(folder: Path, files: dict[str, str], spec: dict[str, object]) -> None:
    write_files(folder, files | {TESTS: json.dumps(spec)})


class ServiceRunner:
    """Runs programs by a Sandbox Fusion service, one request for each test; the outputs are compared here.

    Args:
        rules: Limits.
        url: Address of the service's `/run_code`.
        concurrency: Most requests at once.
    """

    languages = SERVED

    def __init__(self, rules: Rules, url: str, concurrency: int | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise RecipeError(f"CodeReward has url={show(url)}, expected http://…/run_code or https://…/run_code")
        self.rules = rules
        self.url = url
        self.concurrency = concurrency or REQUESTS

    def lacks(self, tests: Tests) -> str | None:
        """Return the requirement of these tests that cannot be met; None if all can."""
        if all("input" in case for case in tests.cases):
            return None
        return "tests with inputs and outputs; calls and assertions need the sandbox of this machine, without `url`"

    def bind(self) -> None:
        """Prepare to send requests.

        Raises:
            RecipeError: aiohttp is not installed.
        """
        require_http("CodeReward with `url`")
        self._slots = asyncio.Semaphore(self.concurrency)

    async def run(self, program: str, tests: Tests) -> str:
        """Return a verdict for each test up to the end of the time, which is that of the runs themselves.

        Raises:
            RolloutError: The service did not answer with the result of a run, nor for an empty program.
        """
        client = HttpClient(self.url)
        try:
            return await self._verdicts(client, program, tests)
        finally:
            await client.finish()

    async def _verdicts(self, client: HttpClient, program: str, tests: Tests) -> str:
        verdicts, elapsed = "", 0.0
        for case in tests.cases:
            if elapsed > self.rules.total_seconds or (self.rules.stop and "0" in verdicts):
                break
            verdict, seconds = await self._verdict(client, program, tests.language, case)
            if verdict == COMPILE_ERROR:
                return verdict
            verdicts += verdict
            elapsed += seconds
        return verdicts

    async def _verdict(self, client: HttpClient, program: str, language: str, case: Case) -> tuple[str, float]:
        """Return the verdict of one test, and the seconds of the run: infinity if it breaks its sandbox."""

        async def attempt(seconds: float) -> tuple[str, float]:
            try:
                response = await self._run(client, program, language, str(case["input"]), seconds)
            except OversizedError:  # the program floods
                return "0", self.rules.seconds
            return await asyncio.to_thread(self._read, response, str(case["output"]))

        seconds = self.rules.compile_seconds + self.rules.seconds + GRACE_SECONDS
        try:
            return await RetryPolicy(RETRIES, (1 + RETRIES) * (seconds + LONGEST_PAUSE), seconds).call(attempt)
        except (ServiceError, TimeoutError) as error:
            if getattr(error, "status", None) in BLAMED and await self._works(client, language, seconds):
                return "0", math.inf
            last = f"; the last attempt: {error.__cause__}" if isinstance(error.__cause__, ServiceError) else ""
            attempts = f" (after {error.attempts} attempts)" if isinstance(error, ServiceError) else ""
            host = urlsplit(self.url).netloc.rpartition("@")[2]
            raise RolloutError(f"Sandbox Fusion at {host}: {error}{attempts}{last}") from error

    async def _works(self, client: HttpClient, language: str, seconds: float) -> bool:
        """Whether the service returns the result of an empty program."""
        try:
            self._read(await self._run(client, "", language, "", seconds), "")
        except ServiceError:
            return False
        return True

    async def _run(self, client: HttpClient, program: str, language: str, text: str, seconds: float) -> dict[str, Any]:
        """Return the service's response to a program and its input."""
        rules = self.rules
        fields = {
            "code": program,
            "language": SERVED[language],
            "stdin": text,
            "compile_timeout": rules.compile_seconds,
            "run_timeout": rules.seconds,
            "memory_limit_MB": -1 if language in RESERVING else rules.memory_mb,
        }
        async with slot(self._slots):
            return await client.post_json("", json.dumps(fields).encode(), seconds)

    def _read(self, response: dict[str, Any], expected: str) -> tuple[str, float]:
        """Return the verdict that a response means, and the seconds of the run.

        Raises:
            ServiceError: It means none.
        """
        compiled, run = response.get("compile_result"), response.get("run_result")
        if response.get("status") in ("Success", "Failed"):
            if isinstance(compiled, dict) and not _succeeded(compiled):
                return COMPILE_ERROR, 0.0
            if isinstance(run, dict) and isinstance(run.get("stdout") or "", str):
                right = _succeeded(run) and same_text(run.get("stdout") or "", expected, self.rules.tolerance)
                seconds = run.get("execution_time")
                return str(int(right)), seconds if isinstance(seconds, int | float) else 0.0
        raise ServiceError(f"answered {shorten(str(response), MAX_QUOTED)}, expected a status and results of a run")


def _succeeded(result: dict[str, Any]) -> bool:
    return result.get("status") == "Finished" and result.get("return_code") == 0

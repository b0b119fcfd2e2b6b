"""A reward for programs: how many tests of the row they pass."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rlkit.base.command import ROOT, Command, CommandLimits, environment_of_run, temporary_folder, write_files
from rlkit.base.deadlines import slot
from rlkit.base.errors import RecipeError, RolloutError
from rlkit.base.grader import COMPILE_ERROR, TESTS
from rlkit.base.program import PROGRAM
from rlkit.base.ranges import Count, NonNegativeFloat, PositiveInt, Seconds
from rlkit.interfaces.reward import OnError, RewardManager
from rlkit.interfaces.runtime import Runtime
from rlkit.rewards.code_tests import program_of, read_cases, setup_of
from rlkit.types import Prompt, Score, Trajectory

GRADER = "import sys; sys.path.insert(0, sys.argv[1]); from rlkit.base.grader import main; main()"
GRADER_MB = 128
"""Memory of the grader and of the processes that confine it."""
PROCESSES = 64
DISK_MB = 256
GRACE_SECONDS = 10.0
"""Between the grader's deadline and its end by force."""
SINGLE_THREADED = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}


class CodeReward(RewardManager):
    """1 if the Python program in a completion passes all tests of its row, else 0; or the share that it passes.

    The program is the last fenced block, or without one all of the completion. Tests are pairs of input and output,
    calls of a function with expected values, or assertions, in the forms of APPS, TACO, LiveCodeBench, PRIME,
    SYNTHETIC-1, MBPP and HumanEval. Outputs are compared word for word, lines apart, without blank lines; numbers that
    are no integers up to the tolerance.

    It runs in a sandbox without network and apart from the tests: the program never has an expected answer, and what it
    returns is compared as plain data in another process. A program that hangs, floods, kills or forks fails the tests
    that it does not answer. The names that assertions do not define are the program's.

    Args:
        allow_code: Must be true, since it runs what the policy writes and the tests of the data.
        tests: The column with the tests; null for the reference answer.
        partial: The reward is the share of the tests that pass; otherwise the first failure ends them.
        seconds: Time of one test.
        total_seconds: Time of all tests of a completion; those that it does not reach fail.
        memory_mb: Memory of the program.
        tolerance: Difference up to which numbers are equal, absolute or relative to the expected one; integers exactly.
        sandbox: Confine it, or refuse a machine that cannot; false gives the program the user's rights and network.
        concurrency: Most completions at once; null for the number of CPUs.
        timeout: Seconds for the samples of one prompt, without the wait for others to end.
        on_error: What happens to a group with a failed score.
    """

    def __init__(
        self,
        allow_code: bool = False,
        *,
        tests: str | None = None,
        partial: bool = False,
        seconds: Seconds = 6.0,
        total_seconds: Seconds = 60.0,
        memory_mb: PositiveInt = 1024,
        tolerance: NonNegativeFloat = 1e-6,
        sandbox: bool = True,
        concurrency: Count | None = None,
        timeout: Seconds = 1800.0,
        on_error: OnError = "drop",
    ) -> None:
        self.allow_code = allow_code
        if not self.allow_code:
            raise RecipeError("CodeReward runs what the policy writes; set allow_code: true if you want that")
        self.tests = tests
        self.partial = partial
        self.seconds = seconds
        self.total_seconds = total_seconds
        self.memory_mb = memory_mb
        self.tolerance = tolerance
        self.sandbox = sandbox
        self.concurrency = concurrency
        self.timeout = timeout
        self.on_error = on_error
        self.components = ("accuracy", "compile_error", *(("tests_passed",) if partial else ()))
        line = shlex.join([sys.executable, "-I", "-B", "-c", GRADER, str(ROOT)])
        limits = CommandLimits(self.memory_mb + GRADER_MB, PROCESSES, DISK_MB, DISK_MB)
        package = [str(ROOT / "rlkit")]
        self.command = Command("CodeReward", line, limits, confined=self.sandbox, readable=package)

    def bind(self, runtime: Runtime) -> None:
        self.command.check()
        self._slots = asyncio.Semaphore(self.concurrency or os.cpu_count() or 1)

    def unscorable(self, prompt: Prompt) -> str | None:
        try:
            self._spec(prompt)
        except ValueError as error:
            return f"cannot be tested: {error}"
        return None

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        try:
            cases, spec = await asyncio.to_thread(self._spec, trajectories[0].prompt)
        except ValueError as error:
            return [Score(None, error=f"CodeReward: {error}") for _ in trajectories]
        return list(await asyncio.gather(*(self._score(t.text, cases, spec) for t in trajectories)))

    def _spec(self, prompt: Prompt) -> tuple[int, str]:
        """Return the number of tests, and what the grader reads."""
        row = prompt.meta
        cases = read_cases(prompt.answer if self.tests is None else row.get(self.tests), row)
        limits = {"seconds": self.seconds, "total_seconds": self.total_seconds, "memory_mb": self.memory_mb}
        rules = {"tolerance": self.tolerance, "stop": not self.partial, "setup": setup_of(row)}
        return len(cases), json.dumps({"cases": cases, **limits, **rules})

    async def _score(self, text: str, cases: int, spec: str) -> Score:
        try:
            async with slot(self._slots), temporary_folder("rlkit-reward-") as parent:
                verdicts = await self._grade(parent / "folder", {PROGRAM: program_of(text), TESTS: spec})
        except (OSError, RolloutError) as error:
            return Score(None, error=f"CodeReward: {error}")
        share = verdicts.count("1") / cases
        accuracy = float(share == 1)
        components = {"accuracy": accuracy, "compile_error": float(verdicts.startswith(COMPILE_ERROR))}
        if self.partial:
            components["tests_passed"] = share
        failed = len(verdicts) - len(verdicts.lstrip("1")) + 1
        problem = "does not compile" if components["compile_error"] else f"fails test {failed} of {cases}"
        feedback = None if accuracy else f"The program {problem}."
        return Score(share if self.partial else accuracy, components, feedback=feedback)

    async def _grade(self, folder: Path, files: dict[str, str]) -> str:
        """Return the verdicts of the grader, which may have been killed on the way."""
        folder.mkdir()
        await asyncio.to_thread(write_files, folder, files)
        environment = environment_of_run() | SINGLE_THREADED | {"HOME": str(folder), "PYTHONHASHSEED": "0"}
        try:
            async with asyncio.timeout(self.total_seconds + GRACE_SECONDS):
                return (await self.command.run(folder, environment)).output.partition("\n")[0]
        except TimeoutError:
            return ""

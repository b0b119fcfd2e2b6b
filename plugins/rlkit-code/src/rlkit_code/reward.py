"""A reward for programs: how many tests of the row they pass."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rlkit.base.errors import RecipeError, RolloutError, show
from rlkit.base.ranges import Count, NonNegativeFloat, PositiveInt, Seconds
from rlkit.interfaces.parser import after_thinking
from rlkit.interfaces.reward import OnError, RewardManager
from rlkit.interfaces.runtime import Runtime
from rlkit.types import Prompt, Score, Trajectory
from rlkit_code.cases import program_of, read_cases, setup_of
from rlkit_code.grader import COMPILE_ERROR
from rlkit_code.runners import Rules, SandboxRunner, ServiceRunner, Tests, read_language


class CodeReward(RewardManager):
    """1 if the program in a completion passes all tests of its row, else 0; or the share that it passes.

    The program is the last fenced block, or without one all of the completion; thinking (`<think>`) is left out. Tests
    are pairs of input and output, calls of a function with expected values, or assertions, in the forms of APPS, TACO,
    LiveCodeBench, PRIME, SYNTHETIC-1, MBPP and HumanEval. Outputs are compared word for word, lines apart, without
    blank lines; numbers that are no integers up to the tolerance. Programs in other languages than Python have tests
    with inputs and outputs.

    It runs in a sandbox without network and apart from the tests: the program never has an expected answer, and what it
    returns is compared as plain data in another process. A program that hangs, floods, kills or forks fails the tests
    that it does not answer. The names that assertions do not define are the program's. With `url` a Sandbox Fusion
    service runs it, which gets the inputs only.

    Args:
        allow_code: Must be true, since it runs what the policy writes and the tests of the data.
        tests: The column with the tests; null for the reference answer.
        language: Of the programs: python, cpp (g++), javascript (node) or bash; with `url` others too.
        language_column: The column with a row's own language, if it has one; null for none.
        url: Address of a Sandbox Fusion service, such as `http://host:8080/run_code`; null for this machine's sandbox.
        partial: The reward is the share of the tests that pass; otherwise the first failure ends them.
        seconds: Time of one test.
        compile_seconds: Time of the compiler.
        total_seconds: Time of all tests of a completion; those that it does not reach fail.
        memory_mb: Memory of the program, and of the compiler.
        tolerance: Difference up to which numbers are equal, absolute or relative to the expected one; integers exactly.
        sandbox: Confine it, or refuse a machine that cannot; false gives the program the user's rights and network.
        concurrency: Most completions at once; null for the number of CPUs. With `url` most requests; null for 64.
        timeout: Seconds for the samples of one prompt, without the wait for others to end.
        on_error: What happens to a group with a failed score.
    """

    def __init__(
        self,
        allow_code: bool = False,
        *,
        tests: str | None = None,
        language: str = "python",
        language_column: str | None = None,
        url: str | None = None,
        partial: bool = False,
        seconds: Seconds = 6.0,
        compile_seconds: Seconds = 30.0,
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
        self.language = language
        self.language_column = language_column
        self.url = url
        self.partial = partial
        self.seconds = seconds
        self.compile_seconds = compile_seconds
        self.total_seconds = total_seconds
        self.memory_mb = memory_mb
        self.tolerance = tolerance
        self.sandbox = sandbox
        self.concurrency = concurrency
        self.timeout = timeout
        self.on_error = on_error
        self.components = ("accuracy", "compile_error", *(("tests_passed",) if partial else ()))
        limits = (self.seconds, self.compile_seconds, self.total_seconds, self.memory_mb)
        rules = Rules(*limits, self.tolerance, stop=not partial)
        self._runner = (
            SandboxRunner(rules, self.sandbox, self.concurrency)
            if self.url is None
            else ServiceRunner(rules, self.url, self.concurrency)
        )
        try:
            self._language = read_language(language, self._runner.languages)
        except ValueError as error:
            raise RecipeError(f"CodeReward has {error}{'' if url else '; with `url` others too'}") from error

    def bind(self, runtime: Runtime) -> None:
        lacks = self._runner.lacks(Tests(self._language, [], ""))
        if lacks is not None:
            raise RecipeError(f"CodeReward has language={self.language!r}, which needs {lacks}")
        self._runner.bind()

    def unscorable(self, prompt: Prompt) -> str | None:
        try:
            self._read(prompt)
        except ValueError as error:
            return f"cannot be tested: {error}"
        return None

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        try:
            tests = await asyncio.to_thread(self._read, trajectories[0].prompt)
        except ValueError as error:
            return [Score(None, error=f"CodeReward: {error}") for _ in trajectories]
        texts = [after_thinking(t.opened_thinking + t.text) for t in trajectories]
        return list(await asyncio.gather(*(self._score(text, tests) for text in texts)))

    def _read(self, prompt: Prompt) -> Tests:
        """Return the tests of a row.

        Raises:
            ValueError: It has none, or what they need is not there.
        """
        row = prompt.meta
        if self.language_column is not None and self.language_column not in row:
            raise ValueError(f"it has no column {show(self.language_column)}, which is the language_column")
        own = None if self.language_column is None else row[self.language_column]
        language = self._language if own is None else read_language(own, self._runner.languages)
        cases = read_cases(prompt.answer if self.tests is None else row.get(self.tests), row)
        tests = Tests(language, cases, setup_of(row))
        lacks = self._runner.lacks(tests)
        if lacks is not None:
            raise ValueError(f"its programs are in {language}, which needs {lacks}")
        return tests

    async def _score(self, text: str, tests: Tests) -> Score:
        cases = len(tests.cases)
        try:
            verdicts = await self._runner.run(program_of(text), tests)
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

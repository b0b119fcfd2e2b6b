"""Grades a program by test cases: a process in a sandbox that knows the tests.

It reads tests.json and removes it, runs the program in a process of its own (`rlkit_code.program` where it answers
calls), compares what comes back, and writes 1 or 0 for each case. The program never has the expected answers. The
grader never has the program's objects: what comes back is text or plain data, so that no `==`, `exit` or patched
function of the program decides a test. Other processes cannot read the grader's memory or open files. It imports only
the standard library.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import importlib
import json
import math
import os
import re
import resource
import selectors
import signal
import subprocess
import sys
import time
import types
from decimal import Decimal
from itertools import chain
from pathlib import Path

from rlkit_code.program import PRELUDE, PROGRAM, Value, pack, unpack

TESTS = "tests.json"
COMPILE_ERROR = "C"
SET_DUMPABLE = 4
ANSWER = "import sys; sys.path.insert(0, sys.argv[1]); from rlkit_code.program import main; del sys.path[0]; main()"
"""Code of the process that is the program; its argument is the folder with rlkit."""
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?", re.ASCII)
OUTPUT_BYTES = 2**16
"""Output of a program beyond twice the expected output; a program that writes more is killed."""
ANSWER_BYTES = 2**24
MODULES = {"np": "numpy", "pd": "pandas"} | {name: name for name in ("numpy", "pandas", "pytest")}
"""Modules besides the standard library's that tests may use without an import, by their names there."""


class Ended(BaseException):
    """The program has ended, has not answered in time, or has answered too much."""


def same_text(output: str, expected: str, tolerance: float) -> bool:
    """Whether two outputs have the same words in each line that is not blank."""
    ours, theirs = ([line.split() for line in text.splitlines() if line.strip()] for text in (output, expected))
    if list(map(len, ours)) != list(map(len, theirs)):
        return False
    words = zip(chain(*ours), chain(*theirs), strict=True)
    return all(same_word(word, expected_word, tolerance) for word, expected_word in words)


def same_word(word: str, expected: str, tolerance: float) -> bool:
    """Whether two words are equal as texts or as numbers; integers exactly."""
    if word == expected:
        return True
    if not (NUMBER.fullmatch(word) and NUMBER.fullmatch(expected)):
        return False
    a, b = Decimal(word), Decimal(expected)
    if a == b or (a == a.to_integral_value() and b == b.to_integral_value()):
        return a == b
    return near(float(a), float(b), tolerance)


def near(value: float, expected: float, tolerance: float) -> bool:
    """Whether two numbers differ by the tolerance at most, absolute or relative to the expected one."""
    return math.isfinite(value - expected) and abs(value - expected) <= tolerance * max(1.0, abs(expected))


def same_value(value: Value, expected: Value, tolerance: float) -> bool:
    """Whether plain data are equal, tuples as lists, and floating-point numbers up to the tolerance."""
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        pairs = zip(value, expected, strict=False)
        return len(value) == len(expected) and all(same_value(a, b, tolerance) for a, b in pairs)
    if isinstance(value, dict) and isinstance(expected, dict):
        equal_keys = value.keys() == expected.keys()
        return equal_keys and all(same_value(value[key], expected[key], tolerance) for key in expected)
    numbers = isinstance(value, int | float) and isinstance(expected, int | float)
    if numbers and float in (type(value), type(expected)):
        return bool(value == expected) or near(float(value), float(expected), tolerance)
    return bool(value == expected)


def exchange(process: subprocess.Popen[bytes], data: bytes, limit: int, deadline: float, *, line: bool) -> bytes:
    """Write to a process and read until its output ends, or with `line` until the end of a line.

    Raises:
        Ended: That takes too long, or more comes than the limit.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    received, waiting = bytearray(), memoryview(data)
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdin, selectors.EVENT_WRITE)
        selector.register(process.stdout, selectors.EVENT_READ)
        while len(received) <= limit and time.monotonic() <= deadline:
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                if key.fileobj is process.stdout:
                    chunk = os.read(key.fd, 2**16)
                    received += chunk
                    if not chunk or (line and chunk.endswith(b"\n")):
                        return bytes(received)
                    continue
                waiting = waiting[write(key.fd, waiting[: 2**16]) :]
                if not waiting:
                    selector.unregister(process.stdin)
                    if not line:
                        process.stdin.close()
    raise Ended


def write(descriptor: int, data: memoryview) -> int:
    """Write to a pipe; return how many bytes need not be written again, which is all where nobody reads."""
    try:
        return os.write(descriptor, data)
    except BlockingIOError:
        return 0
    except BrokenPipeError:
        return len(data)


def start(command: list[str]) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, with pipes from and to it."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, bufsize=0, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True
    )


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a program and what it has started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with process:  # closes its pipes and waits
        pass


def compiles(compiler: list[str], seconds: float) -> bool:
    """Whether a compiler accepts the program within its time; without one, whether it is Python."""
    if not compiler:
        try:
            compile(Path(PROGRAM).read_text(encoding="utf-8"), PROGRAM, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        return True
    process = start(compiler)
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        kill(process)


def run(case: dict[str, Value], command: list[str], deadline: float, tolerance: float) -> bool:
    """Whether the program writes the expected output and exits with status 0."""
    process = start(command)
    try:
        limit = 2 * len(case["output"]) + OUTPUT_BYTES
        output = exchange(process, case["input"].encode(), limit, deadline, line=False)
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    finally:
        kill(process)
    return process.returncode == 0 and same_text(output.decode(errors="replace"), case["output"], tolerance)


class Program:
    """The program as a process that answers questions; it is started again after it has ended."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.deadline = 0.0
        self.ended = False

    def begin(self, deadline: float) -> None:
        """Begin a case."""
        self.deadline = deadline
        self.ended = False
        if self.process is None:
            self.process = start([sys.executable, "-B", "-c", ANSWER, *sys.argv[1:]])

    def end(self) -> None:
        """End the process, if there is one."""
        if self.process is not None:
            kill(self.process)
            self.process = None

    def ask(self, action: str, *values: Value) -> Value:
        """Return the answer to a question; raise what it has raised there.

        Raises:
            Ended: There is no answer.
        """
        question = json.dumps([action, pack(list(values), lambda value: value._reference)]).encode() + b"\n"
        reply = b""
        if self.process is not None:
            with contextlib.suppress(Ended):
                reply = exchange(self.process, question, ANSWER_BYTES, self.deadline, line=True)
        if not reply:
            self.ended = True
            self.end()
            raise Ended
        kind, value = json.loads(reply)
        if kind == "value":
            return unpack(value, lambda reference: Remote(self, reference))
        error = getattr(builtins, str(value), None)
        if isinstance(error, type) and issubclass(error, Exception):
            raise error(value)
        raise RuntimeError(value)


class Remote:
    """An object of the program, which answers calls; it equals nothing but itself."""

    def __init__(self, program: Program, reference: Value) -> None:
        self._program = program
        self._reference = reference

    def __call__(self, *arguments: Value, **named: Value) -> Value:
        return self._program.ask("call", self, list(arguments), named)

    def __getattr__(self, name: str) -> Value:
        return self._program.ask("get", self, name)

    def __getitem__(self, key: Value) -> Value:
        return self.__getattr__("__getitem__")(key)

    def __len__(self) -> Value:
        return self._program.ask("len", self)

    def __bool__(self) -> Value:
        return self._program.ask("bool", self)

    def __iter__(self) -> Value:
        return self._program.ask("iter", self)

    def __next__(self) -> Value:
        return self._program.ask("next", self)

    def __str__(self) -> Value:
        return self._program.ask("str", self)


def names_of_program(code: str) -> tuple[set[str], dict[str, str]]:
    """Return the names in tests that are the program's, and the modules that tests use without an import.

    A builtin is the program's only if the tests name nothing else of it, as in `assert sum(10, 15) == 6`. A module's
    name is the program's unless the tests read an attribute of it.
    """
    nodes = list(ast.walk(ast.parse(code)))
    loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    stored |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    stored |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stored |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    stored |= {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}
    program = [node for node in imports if isinstance(node, ast.ImportFrom) and node.module == "solution"]
    free = loaded - stored
    owners = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    used = {name for name in free & owners if name in MODULES or name in sys.stdlib_module_names}
    modules = {name: MODULES.get(name, name) for name in used}
    names = {name for name in free - modules.keys() if not hasattr(builtins, name)}
    names |= {alias.name for node in program for alias in node.names}
    return names or {n for n in free - modules.keys() if callable(getattr(builtins, n, None))}, modules


def check(case: dict[str, Value], program: Program, setup: str) -> bool:
    """Whether the code of a case runs to its end; the names that it lacks are the program's, one of them at least."""
    code = f"{setup}\n{case['code']}"
    names, modules = names_of_program(code)
    defined: dict[str, Value] = {}
    for name in names:
        with contextlib.suppress(NameError):
            defined[name] = program.ask("name", name)
    if not defined:
        return False
    space: dict[str, Value] = {}
    if len(defined) < len(names):
        exec(PRELUDE, space)
    space.update(defined)
    sys.modules["solution"] = types.ModuleType("solution")  # from which tests may import the program
    vars(sys.modules["solution"]).update(defined)
    for name, module in modules.items():
        space[name] = importlib.import_module(module)
    exec(compile(code, "tests", "exec", dont_inherit=True), space)
    return True


def call(case: dict[str, Value], program: Program, tolerance: float) -> bool:
    """Whether a function of the program returns the expected value, which may be in a list of its own."""
    value = program.ask("call", program.ask("function", case["function"]), case["arguments"], {})
    expected = [case["value"], *(case["value"] if isinstance(case["value"], list) and len(case["value"]) == 1 else [])]
    return any(same_value(value, alternative, tolerance) for alternative in expected)


def passes(case: dict[str, Value], program: Program, spec: dict[str, Value], deadline: float) -> bool:
    """Whether a case passes before its deadline."""
    try:
        if "input" in case:
            return run(case, spec["command"], deadline, spec["tolerance"])
        program.begin(deadline)
        if "function" in case:
            return call(case, program, spec["tolerance"])
        return check(case, program, spec["setup"]) and not program.ended
    except (Exception, Ended, SystemExit):  # a failed assertion, or whatever a program has answered
        return False


def grade(report: int) -> None:
    """Write 1 or 0 for each case, up to the first failure if that decides; or that the program does not compile."""
    ctypes.CDLL(None).prctl(SET_DUMPABLE, 0, 0, 0, 0)  # closes this process's memory and files to the program
    sys.set_int_max_str_digits(0)
    spec = json.loads(Path(TESTS).read_text(encoding="utf-8"))
    os.unlink(TESTS)
    memory = spec["memory_mb"] << 20
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    if not compiles(spec["compiler"], spec["compile_seconds"]):
        os.write(report, COMPILE_ERROR.encode())
        return
    last = time.monotonic() + spec["total_seconds"]
    program = Program()
    for case in spec["cases"]:
        deadline = min(last, time.monotonic() + spec["seconds"])
        passed = passes(case, program, spec, deadline)
        os.write(report, b"1" if passed else b"0")
        if time.monotonic() > last or (not passed and spec["stop"]):
            break
    program.end()


def main() -> None:
    """Grade in the working directory; the argument is the folder with rlkit."""
    report = os.dup(1)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)  # what tests print is no verdict
    os.dup2(nothing, 2)
    grade(report)

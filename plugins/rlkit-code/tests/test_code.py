"""Programs as completions, in the real sandbox: what each form of tests says of them, and what earns nothing."""

from __future__ import annotations

import json
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rlkit_code import runners as code_runners
from rlkit_code.cases import program_of, read_cases
from rlkit_code.grader import same_text, same_value

from rlkit.base.errors import RecipeError
from rlkit.rewards import CodeReward
from rlkit.testing import example_trajectory
from rlkit.types import Score
from tests.unit.clock import SkippingLoop

DOUBLE = "print(2 * int(input()))"
PAIRS = {"inputs": ["1\n", "21\n"], "outputs": ["2\n", "42"]}
ADD = "def add(a, b):\n    return a + b"
ASSERTS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]


@pytest.fixture(autouse=True)
def _unprobed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the probe of the sandbox, which the tests of commands have."""
    monkeypatch.setattr("rlkit_code.command.Command.check", lambda self: None)


def scores(
    programs: list[str],
    tests: object,
    row: dict[str, Any] | None = None,
    loop: SkippingLoop | None = None,
    **options: Any,
) -> list[Score]:
    """Score programs with the same tests, as the samples of a prompt."""
    reward = CodeReward(allow_code=True, **{"seconds": 60.0, **options})
    answer = tests if isinstance(tests, str) else json.dumps(tests)
    trajectories = [example_trajectory(f"Here:\n```python\n{textwrap.dedent(code)}\n```\n") for code in programs]
    for trajectory in trajectories:
        trajectory.prompt = replace(trajectory.prompt, answer=answer, meta=row or {})

    async def score() -> list[Score]:
        reward.bind(None)  # type: ignore[arg-type]
        return await reward.score(trajectories)

    return (loop or SkippingLoop()).run(score())


def rewards(programs: list[str], tests: object, *row: dict[str, Any], **options: Any) -> list[float | None]:
    return [score.reward for score in scores(programs, tests, *row, **options)]


def test_outputs_decide_and_the_first_failure_ends_the_tests() -> None:
    assert scores([DOUBLE, "print(2)", "print("], PAIRS) == [
        Score(1.0, {"accuracy": 1.0, "compile_error": 0.0}),
        Score(0.0, {"accuracy": 0.0, "compile_error": 0.0}, feedback="The program fails test 2 of 2."),
        Score(0.0, {"accuracy": 0.0, "compile_error": 1.0}, feedback="The program does not compile."),
    ]


def test_partial_credit_is_the_share_of_tests_passed() -> None:
    pairs = {"inputs": ["1", "2", "3", "4"], "outputs": ["2", "4", "6", "8"]}
    late = "n = int(input())\nif n == 2: raise ValueError\nprint(2 * n)"
    graded = scores([late, "print(2)"], pairs, partial=True)
    assert [score.reward for score in graded] == [0.75, 0.25]
    assert graded[0].components == {"accuracy": 0.0, "compile_error": 0.0, "tests_passed": 0.75}
    slow = "read n; [ $n = 1 ] && sleep 60; echo $((2 * n))"  # bash, which starts in a hundredth of its second
    assert rewards([slow], pairs, partial=True, language="bash", seconds=1.0) == [0.75]


def test_tests_beyond_the_total_time_fail() -> None:
    """It ends during the first test, be that in its own time; all others would pass."""
    pairs = {"inputs": ["1"] + ["2"] * 19, "outputs": ["2"] + ["4"] * 19}
    program = "import time; n = int(input()); n == 1 and time.sleep(60); print(2 * n)"
    assert rewards([program], pairs, partial=True, seconds=5.0, total_seconds=0.5) == [0]


@pytest.mark.parametrize(
    "tests",
    [
        {"inputs": [[1, 2], ["a", "b"]], "outputs": [[3], ["ab"]], "fn_name": "add"},
        {"inputs": ["1\n2", '"a"\n"b"'], "outputs": ["3", '"ab"'], "fn_name": "add"},
        [{"input": "1\n2", "output": "3", "testtype": "functional"}],
        {"test_cases": [{"fn_name": "add", "input": "1\n2", "output": "3", "type": "function_call"}]},
        ASSERTS,
        "def check(candidate):\n    assert candidate(1, 2) == 3\n",
        "from solution import add\nimport pytest\n\ndef test_sum():\n    assert add(1, 2) == 3\n\n"
        "def test_kinds():\n    with pytest.raises(TypeError):\n        add(1, 'a')\n",
    ],
    ids=["apps", "lines", "livecodebench", "synthetic", "mbpp", "humaneval", "pytest"],
)
def test_each_form_of_calls_is_read(tests: object) -> None:
    row = {"entry_point": "add", "metadata": json.dumps({"func_name": "add"})}
    method = "class Solution:\n    def add(self, a: List[int], b):\n        return a + b\n"
    others = ["add = lambda a, b: a - b", "def sub(a, b):\n    return a + b"]
    calls = isinstance(tests, dict) or (isinstance(tests, list) and isinstance(tests[0], dict))
    assert rewards([ADD, *others, method], tests, row) == [1, 0, 0, calls]


def test_assertions_see_plain_data_and_objects() -> None:
    code = """
        import collections
        class Stack:
            def __init__(self, items=()): self.items = list(items)
            def push(self, item): self.items.append(item); return self
            def __len__(self): return len(self.items)
            def __iter__(self): return iter(self.items)
        def depth(stack): return len(stack.items)
        def kinds(): return {1: (2, {3}, frozenset({4})), "b": b"5", "c": 6j, "n": None, "i": float("inf")}
        def sum(a, b): return a * b
    """
    tests = [
        "assert kinds() == {1: (2, {3}, frozenset({4})), 'b': b'5', 'c': 6j, 'n': None, 'i': math.inf}",
        "s = Stack([1]).push(2)\nassert len(s) == 2 and list(s) == [1, 2] and s.items[1] == 2 and depth(s) == 2",
        "assert isinstance(kinds()[1], tuple) and abs(depth(Stack()) - 0.0) < 1e-9",
        "assert sum(10, 15) == 150",
        "try:\n    depth(1)\nexcept AttributeError as error:\n    error = None\nassert error is None",
        "assert double(depth(Stack([1, 2]))) == 4",
    ]
    setup = {"test_imports": ["import math"], "test_setup_code": "def double(x):\n    return 2 * x"}
    (score,) = scores([code], tests, setup, partial=True)
    assert score.reward == pytest.approx(5 / 6)  # an exception's name is gone after its block, as in Python
    assert rewards([code], tests[:4] + tests[5:], setup) == [1]


LAZY = {
    "generator": "def count(n):\n    yield from range(n)",
    "map": "def count(n):\n    return map(int, range(n))",
    "class": "class count:\n    def __init__(self, n): self.n = n\n    def __iter__(self): return iter(range(self.n))",
    "items": "class count:\n def __init__(self, n): self.n = n\n def __getitem__(self, i): return range(self.n)[i]",
}


@pytest.mark.parametrize("kind", LAZY)
def test_assertions_read_what_has_no_length(kind: str) -> None:
    tests = [
        *(f"assert {of}(count(3)) == {of}([0, 1, 2])" for of in ("list", "tuple", "set", "sorted", "sum")),
        "assert [i for i in count(3)] == [0, 1, 2]",
        "assert count(3) and bool(count(0))",
        "try:\n    len(count(3))\nexcept TypeError:\n    pass\nelse:\n    assert False",
    ]
    assert rewards([LAZY[kind]], tests, partial=True) == [1]


def test_assertions_ask_whether_an_object_is_true() -> None:
    match = "import re\ndef match(text):\n    return re.match('a', text)"
    empty = (
        "class match:\n    def __init__(self, text): self.text = text\n    def __len__(self): return self.text == 'ab'"
    )
    tests = ["assert match('ab')", "assert not match('b')"]
    assert rewards([match, empty, "def match(text): return 3"], tests) == [1, 1, 0]


TRACE = "def trace(m):\n    return sum(row[i] for i, row in enumerate(m))"


def test_a_program_may_have_the_name_of_a_module() -> None:
    assert rewards([TRACE], ["assert trace([[1, 2], [3, 4]]) == 5", "assert math.gcd(trace([[4]]), 6) == 2"]) == [1]
    check = "def check(candidate):\n    assert candidate([[1, 2], [3, 4]]) == 5\n"
    assert rewards([TRACE], check, {"entry_point": "trace"}) == [1]
    bisect = "def bisect(a, x):\n    return a.index(x)"
    check = "def check(candidate):\n    assert candidate([1, 3, 5], 3) == 1\n"
    assert rewards([bisect], check, {"entry_point": "bisect"}) == [1]


@pytest.mark.parametrize(
    "tests",
    [
        ["assert max([1, 5, 2]) == 5"],
        ["assert list(merge([1, 3], [2, 4])) == [1, 2, 3, 4]"],
        {"inputs": [[[1, 3, 5], 3]], "outputs": [1], "fn_name": "bisect_left"},
        "def check(candidate):\n    assert candidate([1, 3, 5], 3) == 2\n",
    ],
)
def test_what_python_has_is_not_the_programs(tests: object) -> None:
    """A program without the function earns nothing, and one that uses Python's own is right."""
    row = {"entry_point": "bisect"}
    uses = "import heapq\nfrom bisect import bisect, bisect_left\nmerge, max = heapq.merge, max"
    assert rewards(["pass", "x = Counter()", uses], tests, row) == [0, 0, 1]


def test_programs_and_tests_need_not_import_the_usual() -> None:
    program = "def count(xs: List[str]):\n    return Counter(xs)\n\ndef best(xs):\n    return heappop(xs)"
    tests = [
        "assert count('aab') == Counter(a=2, b=1)",
        "assert best([1]) == 1",
        "assert count([]) == defaultdict(int)",
    ]
    assert rewards([program], tests) == [1]


HOSTILE = {
    "equal to anything": """
        class Same(int):
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            __hash__ = None
        class Any(Same): pass
        def secret(x): return Same(x)
    """,
    "equal object": """
        class Same:
            def __eq__(self, other): return True
            def __bool__(self): return True
            def __sub__(self, other): return 0
        def secret(x): return Same()
    """,
    "exits": "import sys\ndef secret(x): sys.exit(0)",
    "exits at once": "import os; os._exit(0)",
    "exits with a hook": "import atexit, os\natexit.register(os._exit, 0)\ndef secret(x): os._exit(0)",
    "builtins": """
        import builtins, json, math
        builtins.abs = lambda x: 0
        builtins.AssertionError = ValueError
        builtins.isinstance = lambda *_: True
        math.isclose = lambda *_, **__: True
        def abs(x): return 0
        def secret(x): return 0
    """,
    "raises what tests expect": "def secret(x): raise AssertionError",
    "shadows modules": """
        import os
        for name in ("heapq", "colorsys", "pytest", "numpy", "sitecustomize", "rlkit"):
            code = "import os\\nfor fd in range(3, 40):\\n    try: os.write(fd, b'1111')\\n    except OSError: pass"
            open(f"{name}.py", "w").write(code + "\\nos._exit(0)")
        def secret(x): return 0
    """,
    "reads the tests": """
        import glob, os
        def secret(x):
            texts = []
            for path in ["tests.json", *glob.glob("/proc/*/environ"), *glob.glob("/proc/*/cmdline")]:
                try: texts.append(open(path, "rb").read())
                except OSError: pass
            try:
                memory = open(f"/proc/{os.getppid()}/mem", "rb", buffering=0)
                for line in open(f"/proc/{os.getppid()}/maps"):
                    first, last = (int(address, 16) for address in line.split()[0].split("-"))
                    if " rw" in line:
                        memory.seek(first)
                        texts.append(memory.read(last - first))
            except OSError: pass
            return 70707 if any(b"== 70707" in text for text in texts) else 0
    """,
    "writes verdicts": """
        import os
        for number in range(1, 64):
            try: os.write(number, b"1111\\n")
            except OSError: pass
        for path in (f"/proc/{os.getppid()}/fd/{n}" for n in range(20)):
            try: open(path, "w").write("1111")
            except OSError: pass
        def secret(x): return 0
    """,
    "kills the grader": "import os\ndef secret(x): os.kill(os.getppid(), 9)",
    "kills all": "import os\nos.kill(-1, 9)",
    "stops the grader": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)",
    "forks": "import os\nwhile True: os.fork()",
    "daemon": """
        import os, time
        if os.fork() == 0:
            os.setsid()
            time.sleep(4711)
        def secret(x): return 0
    """,
    "floods": "import sys\nwhile True: sys.stdout.write('1' * 65536)",
    "memory": "x = []\nwhile True: x.append(bytearray(2**24))",
    "disk": "f = open('big', 'wb')\nwhile True: f.write(bytes(2**24))",
    "deep data": """
        def secret(x):
            value = []
            for _ in range(10**5): value = [value]
            return value
    """,
    "big data": "def secret(x): return 'x' * 2**26",
    "no source": "\0",
}
HONEST = "def secret(x): return 70707 if x else -1"


@contextmanager
def nothing_left() -> Iterator[None]:
    """Check that no process of a program, and no folder of a reward, is left; those of other tests are elsewhere."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        patch.setattr(code_runners, "GRADER", f"{code_runners.GRADER}  # {folder}")
        yield
        commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
        assert not [command for command in commands if folder.encode() in command]
        assert not list(Path(folder).glob("rlkit-reward-*"))


@pytest.mark.slow
def test_hostile_programs_earn_nothing_and_cost_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkit_code.runners.GRACE_SECONDS", 1.0)
    asserts = [
        "import heapq, colorsys\nassert secret(1) == 70707",
        "import yaml\nassert isinstance(secret(0), int) and abs(secret(0) + 1) < 1e-9",
        "assert math.isclose(secret(2), 70707)",
    ]
    programs = [code for hostile in HOSTILE.values() for code in (hostile, HONEST)]
    options = {"seconds": 2.5, "total_seconds": 4.0, "memory_mb": 256, "concurrency": 6}
    with nothing_left():
        earned = rewards(programs, asserts, partial=True, **options)
    assert dict(zip(HOSTILE, earned[::2], strict=True)) == dict.fromkeys(HOSTILE, 0)
    assert earned[1::2] == [1] * len(HOSTILE)


def test_a_stopped_grader_holds_no_slot() -> None:
    """With deadlines of an hour, for which the test would wait."""
    options = {"seconds": 3600.0, "total_seconds": 3600.0, "concurrency": 1}
    with nothing_left():
        assert rewards([HOSTILE["stops the grader"], HONEST], ["assert secret(1) == 70707"], **options) == [0, 1]


def test_a_hostile_program_prints_nothing_that_counts() -> None:
    pairs = {"inputs": ["0", "1"], "outputs": ["70707", "80808"]}
    prints_both = "print(70707)\nprint(80808)"
    right_but_fails = "print([70707, 80808][int(input())])\nraise SystemExit(3)"
    reads = "import os\nprint(open('tests.json').read())"
    hangs_after = "import os, sys, time\nprint([70707, 80808][int(input())], flush=True)\nos.close(1)\ntime.sleep(60)"
    floods = "while True: print('x' * 1000)"
    ignores_input = "print(70707)"
    programs = [prints_both, right_but_fails, reads, hangs_after, floods]
    with nothing_left():
        assert rewards(programs, pairs, partial=True, seconds=1.0) == [0] * len(programs)
    assert rewards([ignores_input], pairs, partial=True) == [0.5]


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("  1   2 \r\n\n3", "1 2\n3", True),
        ("1\n2", "1 2", False),
        ("yes", "YES", False),
        ("1.0", "1", True),
        ("0.3333333", "0.33333333", True),
        ("0.3333", "0.33333333", False),
        ("1e3", "1000.0000001", True),
        ("1000000007", "1000000008", False),  # integers are exact
        ("123456789012345678901234567890", "123456789012345678901234567891", False),
        ("1_000", "1000", False),
        ("nan", "nan", True),
        ("inf", "1e9999", False),
        ("1e9999", "1", False),
        ("", "", True),
        ("", "0", False),
    ],
)
def test_outputs_are_compared_word_for_word(output: str, expected: str, same: bool) -> None:
    assert same_text(output, expected, 1e-6) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        ((1, [2]), [1, [2]], True),
        (0.1 + 0.2, 0.3, True),
        (1, 1.0000001, True),
        (10**20, 10**20 + 1, False),
        ({"a": (1.0,)}, {"a": [1]}, True),
        ({"a": 1}, {"b": 1}, False),
        ([1, 2], [1], False),
        (float("inf"), float("inf"), True),
        (float("nan"), 0.0, False),
        (None, 0, False),
        ("1", 1, False),
    ],
)
def test_values_are_compared_as_data(value: object, expected: object, same: bool) -> None:
    assert same_value(value, expected, 1e-6) is same


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```\ntext\n```\nb\n```\nend", "b\n"),
        ("```python\nunfinished", "unfinished"),
        ("no fence", "no fence"),
        ("```py\nx = '''```'''\n```", "x = '''```'''\n"),
        ("  ```python\n  a\n  ```", "  a\n"),
    ],
)
def test_the_program_is_the_last_fenced_block(text: str, program: str) -> None:
    assert program_of(text) == program


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (None, "expected inputs and outputs, or assertions"),
        ("[]", "expected inputs and outputs"),
        ({"inputs": ["1"], "outputs": []}, "expected equal lists"),
        ([{"input": "1"}], "`input` and `output`"),
        (["add(1, 2)"], "assert nothing"),
        ("def check(candidate):\n    assert candidate(1)", "assert nothing"),  # no entry_point
        ("import unittest\nclass Tests(unittest.TestCase):\n    def test_a(self): assert 0", "assert nothing"),
        ("def test_a(fixture):\n    assert fixture", "expected none"),
        ("x = (", "neither JSON nor Python"),
        ([{"input": 1, "output": 2, "fn_name": "f"}], "list of arguments"),
    ],
)
def test_rows_without_usable_tests_are_named(tests: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_cases(tests, {})
    prompt = replace(example_trajectory("").prompt, answer=None, meta={"cases": tests})
    assert message in str(CodeReward(allow_code=True, tests="cases").unscorable(prompt))


def test_it_needs_allow_code() -> None:
    with pytest.raises(RecipeError, match="set allow_code: true"):
        CodeReward()


def test_a_grader_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the tests that the digits of its message would pass."""
    monkeypatch.setattr("rlkit_code.command.Command.filled", lambda self, folder, values: ["/absent11"])
    [score] = scores([DOUBLE], PAIRS)
    assert score.reward is None
    assert score.error == "CodeReward: the grader did not start: /absent11: No such file or directory"

"""PythonTool in ordinary use, and on machines of other kinds."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import rlkit_tool_python
from python_calls import bound, run
from rlkit_tool_python import PythonTool

from rlkit.base.errors import RecipeError, RolloutError
from rlkit.registry import load_plugins

HERE = Path(__file__).parent


def talk(*codes: str, **options) -> list[str]:
    """Return the answers to the calls of one conversation."""
    tool = bound(**options)

    async def conversation() -> list[str]:
        state: dict = {}
        await tool.create(state)
        return [await tool.call({"code": code}, state) for code in codes]

    try:
        return asyncio.run(conversation())
    finally:
        tool.close()


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("print('a')\nprint('b')", "a\nb"),
        ("x = 6\nx * 7", "42"),
        ("print('first')\n'last'", "first\n'last'"),
        ("x = 1", "[no output]"),
        ("", "[no output]"),
        ("None", "[no output]"),
        ("print('ä€😀', '\\udc80')", "ä€😀 \\udc80"),
        ("for i in range(3):\n    i", "[no output]"),
        ("import sys\nprint('out')\nprint('err', file=sys.stderr)\nprint('out')", "out\nerr\nout"),
        ("import sys\nprint('bye')\nsys.exit(3)", "bye"),
        ("input()", "EOFError: EOF when reading a line"),
        ("import os\nos.kill(os.getpid(), 11)", "[killed by signal 11]"),
        ("import math, json\nmath.sqrt(json.loads('16'))", "4.0"),
        ("import numpy\nprint(numpy.arange(3).sum())", "3"),
        ("import subprocess\nprint(subprocess.run(['echo', 'hi'], capture_output=True).stdout)", r"b'hi\n'"),
        ("import asyncio\nasyncio.run(asyncio.sleep(0, 'slept'))", "'slept'"),
        ("import threading\nthreading.Timer(0.1, print, ['later']).start()", "later"),
        ("import pickle\nclass A: pass\ntype(pickle.loads(pickle.dumps(A()))).__name__", "'A'"),
        ("import tempfile, os\ntempfile.gettempdir() == os.getcwd()", "True"),
    ],
)
def test_what_it_answers(code: str, answer: str) -> None:
    got = run(code)
    assert got.splitlines()[-1] == answer if "Error" in answer else got == answer


def test_an_error_shows_the_line_and_the_innermost_calls_only() -> None:
    code = "def f(n):\n    return f(n - 1) if n else 1 / 0\nprint('before')\nf(9)"
    before, *lines = run(code).splitlines()
    assert before == "before"
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert "    return f(n - 1) if n else 1 / 0" in lines
    assert sum("in f" in line for line in lines) == 3
    assert lines[-2] == "  [Previous line repeated 1 more time]"


def test_code_that_cannot_be_read_runs_not_at_all() -> None:
    answer = run("print('ran')\nif True\n    pass")
    assert answer.splitlines()[0] == '  File "<cell>", line 2'
    assert answer.endswith("SyntaxError: expected ':'")
    assert "ran" not in run("print('ran')\nreturn 5").splitlines()
    assert "null bytes" in run("\0")


def test_files_are_kept_in_a_conversation_and_variables_are_not() -> None:
    answers = talk(
        "open('words.py', 'w').write('greeting = 5')\nx = 1",
        "import words\nwords.greeting",
        "x",
        "import os\nos.listdir()",
    )
    assert answers[1] == "5"
    assert answers[2].endswith("NameError: name 'x' is not defined")
    assert answers[3] == "['words.py']"
    assert run("import os\nos.listdir()") == "[]"


def test_a_long_answer_loses_its_middle() -> None:
    assert run("print('a' * 50 + 'b' * 51)", output_chars=100) == "a" * 50 + "\n[... output cut ...]\n" + "b" * 49
    assert run("print('ä' * 99)", output_chars=100) == "ä" * 99
    # an odd limit, and characters of four bytes
    assert run("print('😀' * 1000, end='')", output_chars=5) == "😀" * 2 + "\n[... output cut ...]\n" + "😀" * 2


def test_calls_run_at_once() -> None:
    """Each in a folder of its own, and none ends before all have begun."""
    tool = bound(timeout=120)
    assert tool.concurrency == os.cpu_count()
    code = (
        "import os, time\nopen('begun', 'x')\nwhile not os.path.exists('all'): time.sleep(0.01)\nsorted(os.listdir())"
    )

    async def eight() -> list[str]:
        states: list[dict] = [{} for _ in range(8)]
        for state in states:
            await tool.create(state)
        calls = [asyncio.create_task(tool.call({"code": code}, state)) for state in states]
        while not all(Path(state["folder"], "begun").exists() for state in states):
            await asyncio.sleep(0.01)
        for state in states:
            Path(state["folder"], "all").touch()
        return await asyncio.gather(*calls)

    assert asyncio.run(eight()) == ["['all', 'begun']"] * 8
    tool.close()


def test_a_call_without_the_protections_of_bind_runs_nothing() -> None:
    tool = bound()
    tool.layers = [*tool.layers, "another"]
    state: dict = {}
    asyncio.run(tool.create(state))
    with pytest.raises(RolloutError, match="another"):
        asyncio.run(tool.call({"code": "open('ran', 'w')"}, state))
    assert os.listdir(state["folder"]) == []
    tool.close()


def test_a_memory_limit_too_small_for_python_is_refused() -> None:
    with pytest.raises(RecipeError, match="cannot run (?s:.*)(MemoryError|failed to map)"):
        PythonTool(memory_mb=1).bind(None)


KINDS = [
    ("ordinary",),
    ("no-namespaces",),
    ("ordinary", "no-namespaces"),
    ("ordinary", "no-mounts"),
    ("ordinary", "bare"),
]
ESCAPES = """
import sys, pytest, python_calls
tool = python_calls.bound()
tool.close()
print("layers:", *tool.layers, flush=True)
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_escapes_fail_on_machines_of_other_kinds(kinds: tuple[str, ...]) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "RLKIT"))}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    without = (f"-pno:{plugin}" for plugin in ("cacheprovider", "xdist", "hypothesispytest", "anyio"))
    chosen = (*without, "-k", "test_it or bomb or daemon or cancelled")
    command = (str(HERE / "machines.py"), *kinds, "--", "-c", ESCAPES, *chosen, str(HERE / "test_escapes.py"))
    done = subprocess.run((sys.executable, *command), env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *_ = done.stdout.splitlines()
    assert ("namespaces" in first) <= (kinds == ("ordinary",))
    assert first == "layers:" or "bare" not in kinds
    expected = r"\b6 passed, 7 skipped" if "bare" in kinds else r"\b13 passed, [0-9]+ deselected in"
    assert re.search(expected, done.stdout), done.stdout


def test_it_registers() -> None:
    registry = load_plugins([("tool-python", rlkit_tool_python)], entry_points=False)
    registry.require_healthy()
    assert registry.parts["tools"]["PythonTool"].cls is PythonTool

"""How far a reader walks from an option on the command line to the constructor that takes it."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from types import FrameType
from typing import Any

from rlkit.commands import CommandLine
from rlkit.recipe import parsing
from rlkit.recipe.parsing.compose import SingleOption
from tests.conftest import ROOT

MOST_FUNCTIONS = 29
MOST_FILES = 12
"""They may only fall."""
EPS = "0.000123"


def holds(value: object) -> bool:
    """Whether data of a recipe, or a command line, has the option's value in it."""
    if isinstance(value, CommandLine | SingleOption):
        return holds([*vars(value).values()])
    if isinstance(value, dict | list | tuple):
        return any(map(holds, value.values() if isinstance(value, dict) else value))
    return EPS in value if isinstance(value, str) else isinstance(value, float) and value == float(EPS)


def walk() -> list[tuple[str, str]]:
    """Return the files and functions of rlkit that get the value of `--advantage.eps`, in the order of their calls."""
    from rlkit.advantages import GRPO
    from rlkit.cli.main import main

    steps: dict[tuple[str, str], None] = {}
    constructor = GRPO.__init__.__code__

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(ROOT / "rlkit")):
            return
        arguments = inspect.getargvalues(frame)
        names = [name for name in (*arguments.args, arguments.varargs, arguments.keywords) if name in arguments.locals]
        is_comprehension = code.co_name.startswith("<") and code.co_name != "<lambda>"
        if not is_comprehension and any(holds(arguments.locals[name]) for name in names):
            steps[code.co_filename, code.co_qualname] = None
        if code is constructor:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(note)
    main(["fit", "--recipe=quickstart", f"--advantage.eps={EPS}"])
    return [*steps]


def test_an_option_is_soon_where_it_is_used() -> None:
    done = subprocess.run((sys.executable, "-m", __name__), cwd=ROOT, capture_output=True, text=True, check=True)
    steps = [line.split() for line in done.stdout.splitlines()]
    assert len(steps) <= MOST_FUNCTIONS, done.stdout
    assert len({file for file, _ in steps}) <= MOST_FILES, done.stdout
    functions = [function.rpartition(".")[2] for _, function in steps]
    described = re.findall(r"^    (\w+) {2,}", parsing.__doc__ or "", re.M)
    assert described
    assert described == [function for function in functions if function in described]


if __name__ == "__main__":
    for file, function in walk():
        print(file.removeprefix(f"{ROOT}/"), function)

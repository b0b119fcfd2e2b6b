"""Errors of plugins and of a user's files name the file, the line and the code."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from rlkit.base.errors import explain_foreign
from rlkit.cli.main import main
from tests.conftest import FAST

CODE = """\
import json

def helper(call):
    return call()

def misspelt(prompt):
    return prompt.answr

def in_a_library():
    return json.loads("{")

def through_rlkit():
    from rlkit.base.text import part_name
    return helper(lambda: part_name.missing)
"""


def error_of(module: Any, name: str, *arguments: object) -> BaseException:
    with pytest.raises(Exception) as raised:  # noqa: PT011 (whatever the code raises)
        getattr(module, name)(*arguments)
    return raised.value


def test_the_line_is_the_innermost_of_the_users_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    spec: Any = importlib.util.spec_from_file_location("mine", file)
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, arguments, ending in (
        ("misspelt", ("",), f"({file}, line 7: return prompt.answr)"),
        ("in_a_library", (), f'({file}, line 10: return json.loads("{{"))'),
        ("through_rlkit", (), f"({file}, line 14: return helper(lambda: part_name.missing))"),
    ):
        error = error_of(module, name, *arguments)
        frames = error.with_traceback(
            error.__traceback__ and error.__traceback__.tb_next and error.__traceback__.tb_next
        )
        assert explain_foreign(frames).endswith(ending)


def test_an_error_without_foreign_code_has_no_line() -> None:
    assert explain_foreign(ValueError("a")) == "ValueError: a"


def test_a_mistake_in_a_reward_is_shown_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(completion, answer, **_):\n    return float(completion == answer.txt)\n")
    reward = ("--reward=PythonReward", f"--reward.function={file}:score", "--reward.allow_code=true")
    assert main(["fit", "--recipe=quickstart", *FAST, *reward, "--validation=null", f"--out={tmp_path}/out"]) != 0
    printed = " ".join("".join(capsys.readouterr()).split())
    expected = (
        f"AttributeError: 'str' object has no attribute 'txt' ({file}, line 2: return float(completion == answer.txt))"
    )
    assert expected in printed

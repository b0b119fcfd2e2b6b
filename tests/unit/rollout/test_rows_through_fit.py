"""Arguments that a row of the data has for a tool, through `rlkit fit`: a mistyped one costs its own conversation."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlkit import commands, hookimpl
from rlkit.cli.main import main
from rlkit.interfaces.tool import State
from rlkit.registry import load_plugins
from rlkit.tools import Calculator
from tests.conftest import read_jsonl

ROWS = 4
MISTYPED: dict[str, tuple[object, str]] = {
    "an unknown argument": ({"digit": 2}, "got an unexpected keyword argument 'digit'"),
    "a text for a number": ({"digits": "two"}, "digits is 'two', expected a whole number"),
    "no object": (2, "the row's tools.calculator.create is 2, expected an object"),
}


class Rounding(Calculator):
    """Takes how many digits to show from the row of the data."""

    async def create(self, state: State, digits: int = 0) -> None:  # type: ignore[override]
        if not isinstance(digits, int):
            raise TypeError(f"digits is {digits!r}, expected a whole number")
        state["digits"] = digits


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(__name__="tests", rlkit_register=hookimpl(lambda register: register(Rounding)))
    monkeypatch.setattr(commands, "load_plugins", lambda: load_plugins([("rounding", made)], entry_points=False))


def rows(folder: Path, wrong: object) -> str:
    """Write as many rows as a step has prompts; the last one's arguments are `wrong`."""
    created = [{"digits": number} for number in range(ROWS - 1)] + [wrong]
    lines = [
        {"id": f"sum-{i}", "prompt": f"{i + 2} + {i + 3} = ?", "answer": str(2 * i + 5),
         "tools": {"calculator": {"create": arguments}}}
        for i, arguments in enumerate(created)
    ]  # fmt: skip
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def fit(folder: Path, wrong: object) -> list[dict[str, Any]]:
    options = (
        "--recipe=quick_tool", "--task=Jsonl", f"--task.path={rows(folder, wrong)}", "--tools.calculator=Rounding",
        "--validation=null", "--train.steps=2", f"--train.prompts_per_step={ROWS}", "--advantage=ReinforcePP",
        "--rollout.group_size=1", "--rollout.sampling.max_tokens=24", "--train.schedule=Constant",
    )  # fmt: skip
    assert main(["fit", *options, f"--out={folder / 'out'}"]) == 0
    return read_jsonl(folder / "out" / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "error"), MISTYPED.values(), ids=MISTYPED)
def test_a_mistyped_argument_fails_its_conversation_only(
    tmp_path: Path, wrong: object, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of two steps has all four rows, of which one cannot begin; the three others are trained on."""
    metrics = fit(tmp_path, wrong)
    assert [(row["rollout/samples"], row["rollout/failed"]) for row in metrics] == [(ROWS, 1), (ROWS, 1)]
    assert [row["update/steps"] for row in metrics] == [1, 1]
    problem = f"RolloutError: tool 'calculator' cannot begin for prompt 'sum-{ROWS - 1}': "
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("warning: step 1 left out what failed") == 1
    assert f"warning: step 1 left out what failed; 1 time: {problem}" in printed
    for step in (1, 2):
        logged = read_jsonl(tmp_path / "out" / "rollouts" / f"step-0000{step}.jsonl.gz")
        [failed] = [row for row in logged if row["error"] is not None]
        assert len(logged) == ROWS
        assert failed["prompt"] == f"sum-{ROWS - 1}"
        assert failed["error"].startswith(problem)
        assert error in failed["error"]

"""A task that is a class in a file of the user's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlkit.base.errors import RecipeError
from rlkit.cli.main import main
from rlkit.commands import parse, with_recipe_of
from rlkit.tasks import PythonTask
from tests.conftest import read_jsonl

CODE = """
from rlkit.interfaces.task import Task
from rlkit.types import Prompt


class Doubles(Task):
    def __init__(self, largest=40):
        self.largest = largest

    def rows(self, split):
        numbers = range(1, self.largest + 1)
        return [{"n": n} for n in numbers if (n % 10 == 0) == (split == "validation")]

    def prompt(self, row, index):
        n = row["n"]
        return Prompt(f"n{n}", [{"role": "user", "content": f"{n} + {n} = ?"}], str(2 * n))


class Broken(Doubles):
    def rows(self, split):
        return 1 / 0


def function(**options):
    return [1]
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


def options(file: Path, name: str, allow_code: str = "true") -> list[str]:
    function = f"--task.function={file}:{name}"
    return ["--recipe=quickstart", "--task=PythonTask", function, f"--task.allow_code={allow_code}"]


def test_rows_and_prompts_are_those_of_the_class(file: Path) -> None:
    task = PythonTask(f"{file}:Doubles", allow_code=True, options={"largest": 20})
    assert [row["n"] for row in task.rows("validation")] == [10, 20]
    assert len(task.rows("train")) == 18
    prompt = task.prompt({"n": 7}, 0)
    assert (prompt.id, prompt.messages[0]["content"], prompt.answer) == ("n7", "7 + 7 = ?", "14")


def test_its_prompts_are_shown_by_a_verb(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "stats", *options(file, "Doubles"), "--task.options={largest: 30}", "--json"]) == 0
    statistics = json.loads(capsys.readouterr().out)
    assert [statistics["splits"][split]["rows"] for split in ("train", "validation")] == [27, 3]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Double", "has no function 'Double'; did you mean 'Doubles'?"),
        ("function", "returns [1], expected a subclass of rlkit.interfaces.task.Task: rlkit docs plugins/task"),
        (
            "Broken",
            "Broken of rlkit_user_code: `rows` raised ZeroDivisionError: division by zero (mine.py, line 21",
        ),
    ],
)
def test_a_file_that_offers_no_task_is_named(
    name: str, message: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "stats", *options(file, name)]) != 0
    assert message in capsys.readouterr().err.replace(f"{file.parent}/", "")


def test_code_runs_only_where_it_is_allowed(file: Path) -> None:
    file.write_text("raise SystemExit\n" + CODE)
    with pytest.raises(RecipeError, match="PythonTask names .*mine.py:Doubles', whose code would run; set allow_code"):
        parse("fit", options(file, "Doubles", "false"))
    recipe = parse("fit", options(file, "Doubles"))  # nothing of the file has run
    (file.parent / "recipe.yaml").write_text(recipe.yaml)
    with pytest.raises(RecipeError, match="mine.py:Doubles.* would run"):
        with_recipe_of(file.parent, [])


@pytest.mark.slow
def test_a_run_trains_on_its_rows_and_validates_on_those_it_holds_out(file: Path) -> None:
    short = ["--train.steps=1", "--train.prompts_per_step=4", "--rollout.group_size=2", "--log.rollouts.limit=null"]
    assert main(["fit", *options(file, "Doubles"), *short, "--out=run"]) == 0
    ids = {
        split: {row["prompt"] for path in Path("run/rollouts").glob(f"{split}*.jsonl.gz") for row in read_jsonl(path)}
        for split in ("step", "validation")
    }
    assert ids["validation"] == {"n10", "n20", "n30", "n40"}
    assert len(ids["step"]) == 4
    assert not ids["step"] & ids["validation"]

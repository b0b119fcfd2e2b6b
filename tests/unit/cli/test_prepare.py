"""`rlkit data prepare`: what it writes is read as the same prompts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rlkit.base.errors import RecipeError
from rlkit.cli.data import write
from rlkit.cli.main import main
from rlkit.tasks import Jsonl, Mix, Verl
from rlkit.tasks.rows import Rows
from rlkit.types import Prompt
from tests.unit.tasks.test_peers_rows import ROWS


def prompts(task: Jsonl | Verl | Mix) -> list[Prompt]:
    rows = task.rows("train")
    return [task.prompt(rows[index], index) for index in range(len(rows))]


def test_prepared_rows_of_verl_have_their_tools_and_meta(tmp_path: Path) -> None:
    path, out = tmp_path / "verl.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert write(Verl(str(path)), "train", out) == len(ROWS)
    before, after = prompts(Verl(str(path))), prompts(Jsonl(str(out)))
    assert [p.tools for p in after] == [["calculator"], [], [], ["other"]]
    assert after == before
    assert [path.name for path in tmp_path.glob("*.partial")] == []


def test_a_row_that_json_cannot_hold_is_written_without_it(tmp_path: Path) -> None:
    task = Mix({"a": Rows([{"prompt": "x", "answer": "y", "n": float("nan"), "deep": [{"n": float("inf")}]}])})
    assert write(task, "train", tmp_path / "out.jsonl") == 1
    [prompt] = prompts(Jsonl(str(tmp_path / "out.jsonl")))
    assert (prompt.id, prompt.meta) == ("a/0", {"n": None, "deep": [{"n": None}], "data_source": "a"})


def test_a_failure_leaves_what_was_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.jsonl").write_text("as before")
    broken = Rows([{"prompt": "x", "answer": "y"}, {"prompt": None, "answer": "y"}])
    with pytest.raises(RecipeError, match="'prompt' is None"):
        write(broken, "train", tmp_path / "train.jsonl")
    assert os.listdir(tmp_path) == ["train.jsonl"]
    assert (tmp_path / "train.jsonl").read_text() == "as before"
    assert main(["data", "prepare", "--recipe=quickstart", f"--out={tmp_path / 'train.jsonl'}"]) == 2
    assert "which cannot be written" in capsys.readouterr().err

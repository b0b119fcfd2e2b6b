"""Media in rows and replies, which no part of a run can read: refused by row and column, never dropped unnoticed."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from datasets import Dataset, Features, Image, Value

from rlkit.cli.main import main
from rlkit.errors import RlkitError
from rlkit.media import joined, media_in
from rlkit.tasks.rows import Rows

ROW = {"prompt": "What is in <image>?", "answer": "a cat"}
PART = {"type": "image", "image": "cat.png"}
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("columns", "column"),
    [
        ({"images": ["cat.png"]}, "images"),
        ({"image": "cat.png"}, "image"),
        ({"videos": [{"path": "cat.mp4"}]}, "videos"),
        ({"audio": {"array": [0.0], "sampling_rate": 16000}}, "audio"),
        ({"picture": {"bytes": PNG, "path": None}}, "picture"),
        ({"pictures": [{"bytes": PNG, "path": None}]}, "pictures"),
        ({"raw": PNG}, "raw"),
        ({"prompt": [{"role": "user", "content": [PART, {"type": "text", "text": "what?"}]}]}, "prompt"),
        ({"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "prompt"),
        ({"prompt": [{"role": "user", "content": [{"type": "audio"}]}]}, "prompt"),
        ({"prompt": [{"role": "user", "content": [{"type": "text"}]}]}, "prompt"),
        ({"prompt": [{"role": "user", "content": [{"type": "nosuch", "text": "x"}]}]}, "prompt"),
        ({"messages": [{"role": "assistant", "content": [PART]}]}, "messages"),
        ({"completion": [{"role": "assistant", "content": [PART]}]}, "completion"),
    ],
)
def test_media_are_refused_by_row_and_column(columns: dict[str, Any], column: str) -> None:
    task = Rows([ROW, {**ROW, **columns}])
    assert task.prompt(ROW, 0).answer == "a cat"
    with pytest.raises(RlkitError, match=f"row 1: column '{column}' holds media"):
        task.prompt(task.rows("train")[1], 1)


def test_an_image_of_datasets_is_refused_whatever_its_column(tmp_path: Path) -> None:
    picture = io.BytesIO()
    PIL.Image.new("RGB", (2, 2)).save(picture, "PNG")
    features = Features({"prompt": Value("string"), "answer": Value("string"), "view": Image()})
    rows = [{**ROW, "view": {"bytes": picture.getvalue(), "path": None}}]
    task = Rows(Dataset.from_list(rows, features=features))
    with pytest.raises(RlkitError, match="column 'view' holds media"):
        task.prompt(task.rows("train")[0], 0)


def test_empty_columns_and_plain_text_are_no_media() -> None:
    for columns in ({"images": []}, {"images": None}, {"image": ""}, {"videos": None, "audio": []}):
        assert Rows([{**ROW, **columns}]).prompt({**ROW, **columns}, 0).messages[0]["content"] == ROW["prompt"]
    assert media_in({"tools": [{"type": "function", "content": [1]}], "html": "<image>", "n": 3}) is None


def test_parts_of_text_are_one_text() -> None:
    parts = [{"type": "text", "text": "2 + 2 "}, {"type": "text", "text": "= ?"}]
    assert joined(parts) == "2 + 2 = ?"
    row = {"prompt": [{"role": "user", "content": parts}], "answer": "4"}
    assert Rows([row]).prompt(row, 0).messages == [{"role": "user", "content": "2 + 2 = ?"}]
    for other in ("x", None, [], [PART], ["x"], [{"type": "text", "text": 3}]):
        assert joined(other) == other


def test_fit_refuses_rows_with_images_before_it_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({**ROW, "images": names}) + "\n" for names in ([], ["b.png"])), encoding="utf-8")
    words = ("--recipe=quickstart", "--task=Jsonl", f"--task.path={path}", "--validation=null", f"--out={tmp_path}/run")
    assert main(["fit", *words]) == 2
    assert "rows.jsonl, line 2: column 'images' holds media" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()

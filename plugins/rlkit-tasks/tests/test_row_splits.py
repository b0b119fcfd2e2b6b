"""Rows that are read from files: saved formats, held-out shares and empty files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_data_files import questions, write

from rlkit.base.errors import RecipeError
from rlkit.tasks import HFDataset, Jsonl


@pytest.mark.parametrize(
    ("kind", "options"), [("pandas", {}), ("arrow", {}), ("numpy", {}), ("custom", {"transform": "x"})]
)
def test_a_saved_format_does_not_change_rows(tmp_path: Path, kind: str, options: dict[str, str]) -> None:
    import datasets

    datasets.Dataset.from_list(questions("a")).save_to_disk(tmp_path / "t")
    state = json.loads((tmp_path / "t" / "state.json").read_text())
    state |= {"_format_type": kind, "_format_kwargs": options, "_format_columns": ["answer"]}
    (tmp_path / "t" / "state.json").write_text(json.dumps(state))
    task = HFDataset(str(tmp_path / "t"))
    row = task.rows("train")[0]
    assert (dict(row), type(row["answer"])) == (questions("a")[0], str)


def test_rows_of_text_alone_are_divided_by_their_texts(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", *[{"text": f"text {i}"} for i in range(20)])
    task = Jsonl(path, validation_split=0.25, answer_field=None)
    assert [len(task.rows(split)) for split in ("train", "validation")] == [15, 5]


@pytest.mark.parametrize(
    ("rows", "share", "cause"),
    [
        ([{"text": "same"}] * 4, 0.25, "all 4 rows are equal"),
        ([{"prompt": "a"}, {"prompt": "b"}], 0.99, "all 2 rows are held out"),
    ],
)
def test_a_split_that_leaves_nothing_to_train_on_says_why(
    tmp_path: Path, rows: list[dict[str, str]], share: float, cause: str
) -> None:
    task = Jsonl(write(tmp_path / "t.jsonl", *rows), validation_split=share, answer_field=None)
    with pytest.raises(RecipeError, match=cause):
        task.rows("train")


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    for task in (Jsonl(str(tmp_path / "empty.jsonl")), HFDataset(str(tmp_path / "empty.jsonl"))):
        with pytest.raises(RecipeError, match=r"no train rows.*empty\.jsonl"):
            task.rows("train")

"""Rows of text files: parsed when they are asked for, and not searched for again in the next start."""

from __future__ import annotations

import csv
import gzip
import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from rlkit_tasks import lines, text_rows
from rlkit_tasks.table import CHUNK, Table
from rlkit_tasks.text_rows import TextRows

from rlkit.tasks import HFDataset, Jsonl

ROWS = [{"prompt": f"{n} + {n} =", "answer": str(2 * n)} for n in range(200)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of copies, of which each file has one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(text_rows, "IN_MEMORY", 0)
    return tmp_path / "cache" / "rlkit" / "rows"


@pytest.fixture
def parsed_rows(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The locations of rows, as they are parsed."""
    locations: list[str] = []

    def counted(line: str, location: str) -> dict[str, object]:
        locations.append(location)
        return dict(lines.parsed(line, location))

    monkeypatch.setattr(text_rows, "parsed", counted)
    return locations


def written(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_a_second_start_parses_no_row_again(cache: Path, parsed_rows: list[str], tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", ROWS)
    splits = []
    for start in range(2):
        task = Jsonl(str(path), validation_split=0.1)
        train, validation = task.rows("train"), task.rows("validation")
        assert len(parsed_rows) == (0 if start else len(ROWS))
        assert (len(train), len(validation)) == (180, 20)
        splits.append((list(train), list(validation)))
        parsed_rows.clear()
    assert splits[0] == splits[1]
    other = Jsonl(str(path), validation_split=0.1, split_seed=1)  # what is stored depends on the options
    assert list(other.rows("validation")) != splits[0][1]


def test_small_files_and_copies_have_the_same_rows(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "a.jsonl", ROWS)
    copied = Jsonl(str(path), validation_split=0.1)
    expected = [list(copied.rows(split)) for split in ("train", "validation")]
    monkeypatch.setattr(text_rows, "IN_MEMORY", 1 << 20)
    in_memory = Jsonl(str(path), validation_split=0.1)
    assert [list(in_memory.rows(split)) for split in ("train", "validation")] == expected


def test_a_run_reads_what_it_checked_whatever_the_file_becomes(cache: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", ROWS)
    rows = Jsonl(str(path)).rows("train")
    path.write_text("no JSON\n")
    assert list(rows) == ROWS
    written(path, ROWS[:3])
    assert list(Jsonl(str(path)).rows("train")) == ROWS[:3]


def test_copies_are_the_users_alone(cache: Path, tmp_path: Path) -> None:
    Jsonl(str(written(tmp_path / "a.jsonl", ROWS))).rows("train")
    [copy] = cache.iterdir()
    assert stat.S_IMODE(cache.stat().st_mode) == stat.S_IMODE(copy.stat().st_mode) == 0o700


def test_a_damaged_copy_is_made_again(cache: Path, tmp_path: Path) -> None:
    path = str(written(tmp_path / "a.jsonl", ROWS))
    Jsonl(path).rows("train")
    [copy] = cache.iterdir()
    for name, content in (("text", b"{}"), ("rows.npy", b"\x93NUMPY"), ("files.npy", b"")):
        (copy / name).write_bytes(content)
        assert list(Jsonl(path).rows("train")) == ROWS
    assert [*cache.iterdir()] == [copy]


def test_a_start_opens_a_copy_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(written(tmp_path / "a.jsonl", ROWS))
    Jsonl(path).rows("train")
    folders: list[Path] = []
    open_copy = text_rows._open_copy
    monkeypatch.setattr(text_rows, "_open_copy", lambda folder: folders.append(folder) or open_copy(folder))
    assert list(Jsonl(path).rows("train")) == ROWS
    assert folders == [*cache.iterdir()]


def test_without_a_cache_the_copy_is_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path, parsed_rows: list[str]
) -> None:
    path = str(written(tmp_path / "a.jsonl", ROWS))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    rows = TextRows([path], [None])
    assert list(rows) == ROWS
    assert len([*(tmp_path / "temporary").iterdir()]) == 1
    del rows
    assert not [*(tmp_path / "temporary").iterdir()]


def test_copies_opened_longest_ago_are_removed(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(written(tmp_path / f"{n}.jsonl", ROWS[n:])) for n in range(3)]
    opened = [TextRows([path], [None]) for path in paths[:2]]
    folders = [rows.folder for rows in opened]
    assert all(folders)
    for age, folder in zip((10, 20), folders, strict=True):
        os.utime(str(folder), (age, age))
    (cache / f"{text_rows.BUILDING}abandoned").mkdir()
    os.utime(cache / f"{text_rows.BUILDING}abandoned", (0, 0))
    size = sum(file.stat().st_size for file in Path(str(folders[0])).iterdir())
    monkeypatch.setattr(text_rows, "MOST_BYTES", 2.5 * size)
    third = TextRows([paths[2]], [None])
    assert {*cache.iterdir()} == {folders[1], third.folder}
    assert list(opened[0]) == ROWS  # what is open stays readable


def test_a_second_start_reads_long_fields(cache: Path, tmp_path: Path) -> None:
    path, long = tmp_path / "a.csv", "a" * 200_000
    path.write_text(f"prompt\n{long}\n")
    TextRows([str(path)], [","])
    before = csv.field_size_limit(2**17)  # as in a new process, which opens the copy and indexes nothing
    try:
        assert [*TextRows([str(path)], [","])] == [{"prompt": long}]
    finally:
        csv.field_size_limit(before)


def test_files_of_several_forms_are_copied_as_one(cache: Path, tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl", ROWS[:2])
    (tmp_path / "b.csv").write_bytes(b'\xef\xbb\xbfprompt,answer\n\nx,1\n\n"y\nz",2\n')
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf\n  \n" + json.dumps(ROWS[2]).encode()))
    (tmp_path / "d.tsv").write_text("prompt\tanswer\nq, r\t3")
    rows = HFDataset([str(tmp_path / name) for name in ("a.jsonl", "b.csv", "c.jsonl.gz", "d.tsv")]).rows("train")
    assert [*rows] == [
        *ROWS[:2],
        {"prompt": "x", "answer": "1"},
        {"prompt": "y\nz", "answer": "2"},
        ROWS[2],
        {"prompt": "q, r", "answer": "3"},
    ]
    locations = [row.location.removeprefix(f"{tmp_path}/") for row in rows]  # type: ignore[attr-defined]
    assert locations == [
        "a.jsonl, line 1", "a.jsonl, line 2", "b.csv, line 3", "b.csv, line 6", "c.jsonl.gz, line 3", "d.tsv, line 2",
    ]  # fmt: skip
    assert len([*cache.iterdir()]) == 1


@given(st.lists(st.lists(st.text('a,"\n\té ', max_size=5), min_size=2, max_size=2), max_size=8))
def test_rows_of_csv_are_those_that_python_writes(
    tmp_path_factory: pytest.TempPathFactory, table: list[list[str]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.csv"
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([["first", "second"], *table])
    rows = TextRows([str(path)], [","])
    assert [list(row.values()) for row in rows] == table
    assert [list(rows[index].values()) for index in reversed(range(len(rows)))] == table[::-1]


def test_a_parquet_row_out_of_order_is_decoded_alone() -> None:
    decoded: list[int] = []

    class Counted(Dataset):
        def __getitem__(self, key: slice) -> dict[str, list[object]]:  # type: ignore[override]
            decoded.append(key.stop - key.start)
            return super().__getitem__(key)  # type: ignore[no-any-return]

    data = Counted(Dataset.from_list([{"n": n} for n in range(4 * CHUNK)]).data)
    table = Table([("a", data)])
    assert [table[n]["n"] for n in (700, 3, 699)] == [700, 3, 699]
    assert decoded == [1, 1, 1]
    decoded.clear()
    assert [row["n"] for row in table] == [*range(4 * CHUNK)]
    assert decoded == [1, *[CHUNK] * 4]
    assert [row["n"] for row in table.select(np.array([5, 9, 2])).select(np.array([2, 0]))] == [2, 5]

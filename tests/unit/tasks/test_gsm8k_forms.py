"""GSM8K in every form that data come in: the same prompts, in one file or two.

It is the real one where it is beside the repository, else a dozen problems in its form.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest

from rlkit.tasks import GSM8K, HFDataset
from tests.conftest import ROOT

REAL = ROOT.parent / "shared" / "data" / "gsm8k"
KINDS = ("parquet", "jsonl", "csv")


@pytest.fixture(scope="module")
def whole(gsm8k_like: Path) -> Path:
    return REAL if REAL.is_dir() else gsm8k_like


@pytest.fixture(scope="module")
def rows(whole: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (whole / "train.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]]) -> Path:
    """Each kind as one file (`all.KIND`) and as two (`part-0.KIND`, `part-1.KIND`)."""
    folder = tmp_path_factory.mktemp("gsm8k")
    half = len(rows) // 2
    for kind in KINDS:
        for name, part in (("all", rows), ("part-0", rows[:half]), ("part-1", rows[half:])):
            write(folder / f"{name}.{kind}", part)
    return folder


def write(path: Path, rows: Sequence[dict[str, str]]) -> None:
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(list(rows)).to_parquet(path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["question", "answer"])
            writer.writeheader()
            writer.writerows(rows)


def prompts(task: Any) -> Iterator[tuple[str, str]]:
    rows = task.rows("train")
    for index in range(len(rows)):
        prompt = task.prompt(rows[index], index)
        yield prompt.messages[0]["content"], prompt.answer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("files", ["all", "part-*"])
def test_each_form_has_the_same_prompts(
    folder: Path, whole: Path, rows: list[dict[str, str]], kind: str, files: str
) -> None:
    instruction = GSM8K().instruction
    expected = [(f"{row['question']}\n{instruction}", row["answer"]) for row in rows]
    assert len(expected) == (7473 if whole == REAL else 12)
    task = HFDataset(str(folder / f"{files}.{kind}"), template=f"{{question}}\n{instruction}")
    assert list(prompts(task)) == expected
    assert list(prompts(GSM8K(str(whole)))) == expected

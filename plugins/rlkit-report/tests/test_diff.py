"""`rlkit diff`: what is the first thing in which two runs differ."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlkit.cli.main import main
from tests.conftest import read_jsonl

FEW = (
    "--recipe=quickstart", "--train.steps=3", "--train.prompts_per_step=2", "--rollout.group_size=2",
    "--validation.limit=2", "--save.every=1", "--save.keep_last=3", "--train.schedule=Constant",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, the same one again, and one with another learning rate."""
    folder = tmp_path_factory.mktemp("runs")
    for name, options in (("one", ()), ("same", ()), ("other", ("--train.lr=0.002",))):
        assert main(["fit", *FEW, *options, f"--out={folder / name}"]) == 0
    return folder


def diff(*places: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    status = main(["diff", "--json", *map(str, places)])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert status == int(found["differs"])
    return found


def test_a_run_and_its_repetition_are_the_same(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = diff(runs / "one", runs / "same", capsys=capsys)
    assert not found["differs"]
    assert (found["recipe"], found["step"], found["answer"], found["tensor"]) == ({}, None, None, None)
    assert found["steps"] == 3
    # one that is due while the one before is still being written is skipped
    assert found["checkpoints"][0] == "step-000001"
    assert found["checkpoints"][-1] == "step-000003"
    assert main(["diff", str(runs / "one"), str(runs / "same")]) == 0
    printed = capsys.readouterr().out
    assert "recipe: the same" in printed
    assert "metrics: the same in the 3 steps that both have" in printed


def test_another_learning_rate_changes_recipe_step_and_weights(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first step samples alike, and ends with other weights; the second samples from these."""
    found = diff(runs / "one", runs / "other", capsys=capsys)
    assert found["recipe"] == {"train.lr": [0.001, 0.002]}
    assert found["step"]["number"] == 1
    assert list(found["step"]["metrics"]) == ["lr"]
    assert found["answer"]["file"] == "step-00002.jsonl.gz"
    assert found["tensor"]["checkpoint"] == "step-000001"
    assert "elements, by 0.00" in found["tensor"]["what"]
    assert main(["diff", str(runs / "one"), str(runs / "other")]) == 1
    printed = capsys.readouterr().out
    assert "the first step that differs is 1: lr 0.000" in printed


def test_the_first_token_that_differs_is_named(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(runs / "one", tmp_path / "changed")
    path = tmp_path / "changed" / "rollouts" / "step-00002.jsonl.gz"
    rows = read_jsonl(path)
    before, rows[1]["tokens"][5] = rows[1]["tokens"][5], 999
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    found = diff(runs / "one", tmp_path / "changed", capsys=capsys)
    what = f"prompt {rows[1]['prompt']!r}, tokens[5] is {before} and 999"
    assert found["answer"] == {"file": "step-00002.jsonl.gz", "row": 2, "what": what}
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in read_jsonl(path)[:1]).encode()))
    assert diff(runs / "one", tmp_path / "changed", capsys=capsys)["answer"]["what"] == "only one of the runs has it"


def test_numbers_that_are_kept_with_fewer_digits_are_the_same(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Earlier versions wrote 17 digits of metrics and advantages, integers with a point, and longer times and logps."""
    shutil.copytree(runs / "one", tmp_path / "earlier")
    metrics, path = (tmp_path / "earlier" / name for name in ("metrics.jsonl", "rollouts/step-00002.jsonl.gz"))
    lines = [{k: x if k == "step" else x * (1 + 1e-12) for k, x in row.items()} for row in read_jsonl(metrics)]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = read_jsonl(path)

    def answer(offset: float) -> Any:
        changed = [row | {"logps": [round(x + offset, 5) for x in row["logps"]]} for row in rows]
        changed = [row | {"advantages": [x + 3.1e-6 for x in row["advantages"]]} for row in changed]
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in changed).encode()))
        found = diff(runs / "one", tmp_path / "earlier", capsys=capsys)
        assert found["step"] is None
        return found["answer"]

    assert answer(0.0) is None
    assert "logps[0] is 0.0 and 2e-05" in answer(2e-5)["what"]


def test_a_run_in_progress_is_compared_as_far_as_it_is(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs / "one", tmp_path / "begun")
    lines = (tmp_path / "begun" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "begun" / "metrics.jsonl").write_text(lines[0] + lines[1][:40])
    shutil.rmtree(tmp_path / "begun" / "checkpoints")
    found = diff(runs / "one", tmp_path / "begun", capsys=capsys)
    assert (found["differs"], found["steps"], found["checkpoints"]) == (False, 1, [])


def test_what_is_no_run_or_is_damaged_is_refused(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*places: object) -> str:
        assert main(["diff", *map(str, places)]) in (1, 2)
        return " ".join(capsys.readouterr().err.split())

    assert "needs two run folders" in refused(runs / "one")
    assert "is no run folder" in refused(runs / "one", tmp_path)
    assert "is no run folder" in refused(runs / "one", tmp_path / "none")
    for name, content in (("metrics.jsonl", b"{}\nno JSON\n"), ("rollouts/step-00001.jsonl.gz", b"no gzip"),
                          ("environment.json", b"[" * 9), ("recipe.yaml", b"\xff")):  # fmt: skip
        shutil.copytree(runs / "one", tmp_path / "damaged")
        (tmp_path / "damaged" / name).write_bytes(content)
        assert f"{name} cannot be read" in refused(runs / "one", tmp_path / "damaged")
        shutil.rmtree(tmp_path / "damaged")

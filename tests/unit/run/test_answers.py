"""The answers of validations as files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rlkit.cli.main import main
from rlkit.records.folder import of_rank
from rlkit.records.validation_metrics import GradedCompletion
from rlkit.run.answers import write_answers
from rlkit.run.evaluate import Evaluation
from rlkit.testing import example_trajectory
from rlkit.types import Prompt, Score, StopReason, Trajectory
from tests.conftest import FAST, read_jsonl


def scored(group: int, text: str, score: Score | None, error: str | None = None) -> Trajectory:
    trajectory = example_trajectory(text)
    trajectory.prompt = Prompt(f"p{group}", [{"role": "user", "content": "?"}], "7", {"data_source": "sums"})
    trajectory.group, trajectory.score, trajectory.error = group, score, error
    return trajectory


def evaluation(greedy: list[Trajectory], sampled: list[Trajectory]) -> Evaluation:
    found = Evaluation()
    for prefix, some in (("", greedy), ("sampled_", sampled)):
        found.add(prefix, some, [GradedCompletion.of(t) for t in some])
    return found


def test_each_answer_is_a_row_of_both_files(tmp_path: Path) -> None:
    import pandas

    right, wrong = Score(1.5, {"accuracy": 1.0, "format": 0.5}, answer="seven"), Score(0.0, {"accuracy": 0.0})
    found = evaluation(
        [scored(0, "7", right), scored(1, "", None, "the tool failed")],
        [scored(0, "7", right), scored(0, "8", wrong), scored(1, "9", Score(None, error="late"))],
    )
    write_answers(tmp_path / "before", found)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["before.jsonl.gz", "before.parquet"]
    lines = read_jsonl(tmp_path / "before.jsonl.gz")
    table = pandas.read_parquet(tmp_path / "before.parquet")
    kinds = [("p0", "greedy", 0), ("p1", "greedy", 0), ("p0", "sampled", 0), ("p0", "sampled", 1), ("p1", "sampled", 0)]
    assert [(row["prompt"], row["kind"], row["sample"]) for row in lines] == kinds
    assert list(zip(table["prompt"], table["kind"], table["sample"], strict=True)) == kinds
    assert list(table["text"]) == [row["text"] for row in lines] == ["7", "", "7", "8", "9"]
    known = table[["reward", "accuracy", "reward/format"]].astype(object).where(table["reward"].notna(), None)
    assert known.iloc[0].tolist() == [1.5, 1.0, 0.5]
    assert known.iloc[1].tolist() == known.iloc[4].tolist() == [None, None, None]
    assert table["error"].tolist()[1::3] == ["the tool failed", "late"]
    assert [list(messages) for messages in table["messages"]] == [[{"role": "user", "content": "?"}]] * 5
    first = table.iloc[0]
    assert (first["source"], first["answer"], first["stop"]) == ("sums", "7", StopReason.STOP.value)
    assert table["final_answer"].tolist()[::2][:2] == ["seven", "seven"]
    assert first["length"] == sum(found.answers[""][0].mask)
    assert set(table) == {
        "prompt", "group", "source", "kind", "sample", "messages", "answer", "text", "reward", "accuracy",
        "reward/format", "final_answer", "stop", "length", "turns", "error",
    }  # fmt: skip
    assert {"tokens", "logps", "mask"} <= set(lines[0])


def test_log_probs_of_a_validation_have_five_decimals(tmp_path: Path) -> None:
    answer = scored(0, "7", Score(1.0))
    answer.logps[-2:] = [-0.123456789, -1e-7]
    write_answers(tmp_path / "before", evaluation([answer], []))
    assert str(read_jsonl(tmp_path / "before.jsonl.gz")[0]["logps"][-2:]) == "[-0.12346, 0]"


def test_texts_may_hold_anything(tmp_path: Path) -> None:
    """Half of a surrogate pair is written out, NUL stays; content that is no text is JSON."""
    from pyarrow.parquet import read_table

    hostile = scored(0, "\ud800 猫\x00", Score(1.0, {"\ud800\x1b" + "x" * 500: 1.0}), "\udfff")
    hostile.prompt.messages = [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}, {"role": "tool"}]
    hostile.prompt.answer = None
    write_answers(tmp_path / "a", evaluation([hostile], []))
    [row] = read_table(tmp_path / "a.parquet").to_pylist()
    assert row["text"] == "\\ud800 猫\x00"
    assert row["error"] == "\\udfff"
    assert row["answer"] is None
    assert json.loads(row["messages"][0]["content"]) == [{"type": "text", "text": "\ud800"}]
    assert row["messages"][1] == {"role": "tool", "content": None}
    [name] = [name for name in row if name.startswith("reward/")]
    assert name.isprintable()
    assert len(name) < 120


def test_the_tables_of_all_ranks_are_read_as_one(tmp_path: Path) -> None:
    """Components that only another rank has seen are columns of each; a rank without prompts has no table."""
    from datasets import load_dataset

    scores = [Score(1.0, {"accuracy": 1.0}), Score(0.0, {"accuracy": 0.0, "format": 1.0})]
    parts = [[scored(0, "7", scores[0])], [scored(1, "8", scores[1])], []]
    everyone = [GradedCompletion.of(t) for part in parts for t in part]
    for rank, part in enumerate(parts):
        found = Evaluation()
        found.add("", part, everyone)
        write_answers(tmp_path / of_rank("before", rank), found)
    files = sorted(map(str, tmp_path.glob("before*.parquet")))
    assert [os.path.basename(file) for file in files] == [
        "before.parquet",
        "before.rank1.parquet",
    ]
    rows = load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache")).to_list()
    assert [(row["prompt"], row["accuracy"], row["reward/format"]) for row in rows] == [("p0", 1, None), ("p1", 0, 1)]
    assert rows[0]["messages"] == [{"role": "user", "content": "?"}]


def test_a_run_keeps_every_answer_or_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder is where the table after training should be: that is a warning, and nothing half is left behind."""
    import pandas

    rollouts = tmp_path / "out" / "rollouts"
    (rollouts / "validation-after.parquet" / "full").mkdir(parents=True)
    few = ("--validation.limit=3", "--validation.samples=2", "--log.rollouts.limit=1")
    assert main(["fit", "--recipe=quickstart", *FAST, *few, f"--out={tmp_path / 'out'}"]) == 0
    assert "warning: rollouts/validation-after: IsADirectoryError" in capsys.readouterr().out
    table = pandas.read_parquet(rollouts / "validation-before.parquet")
    assert table["kind"].tolist() == ["greedy"] * 3 + ["sampled"] * 6
    assert table["sample"].tolist() == [0] * 3 + [0, 1] * 3
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    means = table.groupby("kind")["accuracy"].mean()
    assert means["greedy"] == result["validation"]["before"]["accuracy"]
    assert means["sampled"] == pytest.approx(result["validation"]["before"]["sampled_accuracy"])
    assert len(read_jsonl(rollouts / "validation-after.jsonl.gz")) == 9
    assert not list(rollouts.glob("*.partial"))

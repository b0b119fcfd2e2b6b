"""EleutherAI's lm-evaluation-harness on what a run has trained, by a task of two local files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rlkit.cli.main import main
from tests.conftest import FAST, read_jsonl

LAST_NUMBER = {"name": "last", "filter": [{"function": "regex", "regex_pattern": r"(\d+)\D*$"}]}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with a task; its questions are those of `questions.jsonl` beside it, for rlkit."""
    rows = [{"prompt": f"{a} + {b} = ?", "answer": str(a + b)} for a, b in ((28, 14), (12, 13), (57, 38), (40, 21))]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path / "tasks"
    folder.mkdir()
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
        "filter_list": [LAST_NUMBER | {"filter": [*LAST_NUMBER["filter"], {"function": "take_first"}]}],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "sums.yaml").write_text(yaml.safe_dump(task))
    return folder


@pytest.mark.slow
def test_the_harness_agrees_with_validation(tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of an adapter, which is merged for it, and of the initial model: both answer greedily, by the same template."""
    questions = tmp_path / "questions.jsonl"
    lora = ("--model.lora.rank=4", "--model.lora.alpha=8", "--train.lr=0.01")
    out, answers = tmp_path / "run", tmp_path / "answers"
    assert main(["fit", "--recipe=quickstart", *FAST, *lora, "--fabric.accelerator=cpu", f"--out={out}"]) == 0
    place = ["--checkpoint", str(out)]
    own = tmp_path / "own.yaml"
    jsonl = {"class_path": "Jsonl", "init_args": {"path": str(questions), "validation_path": str(questions)}}
    own.write_text(yaml.safe_dump({"validation": {"tasks": {"own": jsonl}, "limit": None, "samples": 0}}))
    capsys.readouterr()
    assert main(["validate", f"--recipe={out / 'recipe.yaml'}", f"--recipe={own}", *place, "--json"]) == 0
    accuracy = json.loads(capsys.readouterr().out.splitlines()[-1])["accuracy"]
    harness = ["--harness=sums", f"--harness-path={tasks}", "--validation.limit=null"]
    assert main(["validate", *place, *harness, "--json", f"--out={answers}"]) == 0
    metrics = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert metrics["sums/exact_match,last"] == accuracy
    [result] = json.loads((answers / "results.json").read_text())["results"]
    assert result["metrics"] == metrics
    assert result["harness"]["n-samples"]["sums"]["effective"] == 4
    rows = read_jsonl(answers / "answers.jsonl.gz")
    assert [row["doc"]["answer"] for row in rows] == ["42", "25", "95", "61"]
    assert rows[0]["task"] == "sums"
    assert rows[0]["arguments"][0][0].endswith("<|im_start|>assistant\n")  # by the chat template
    assert main(["validate", *place, *harness[:2], "--harness=nosuch"]) == 2
    assert "--harness is 'nosuch', expected a task: sums" in capsys.readouterr().err

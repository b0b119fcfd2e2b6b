"""A judged run, from `rlkit fit`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

from rlkit.cli.main import main
from tests.conftest import FAST, read_jsonl
from tests.judge_stand_in import Body, responses, serving


def fit(tmp_path: Path, name: str, server: dict[str, Any], *options: str, **init_args: Any) -> Path:
    """Train with a judge; return the run's folder."""
    reward = {"class_path": "JudgeReward", "init_args": {"server": {"model": "m", **server}, **init_args}}
    (tmp_path / "judge.yaml").write_text(yaml.safe_dump({"reward": reward}))
    out = tmp_path / name
    assert main(["fit", "--recipe=quickstart", f"--recipe={tmp_path}/judge.yaml", *options, f"--out={out}"]) == 0
    return out


def right(body: Body) -> bool:
    """Whether a response ends in the sum that the question asks for: the judge calculates."""
    question = body["messages"][0]["content"].partition("<question-")[2].partition("\n")[2]
    first, second = question.split("=")[0].split("+")
    return last_number(responses(body)[0]) == str(int(first) + int(second))


def last_number(text: str) -> str:
    return (re.findall(r"\d+", text) or [""])[-1]


@pytest.mark.slow
def test_calls_and_tokens_are_metrics_and_the_key_is_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server counts 100 and 10 tokens a call; calls before the first step and of a validation count too."""
    monkeypatch.setenv("RLKIT_JUDGE", "k-123456")
    with serving(lambda body: json.dumps({"score": len(responses(body)[0])})) as stand_in:
        server = {"url": stand_in.url, "key_variable": "RLKIT_JUDGE", "max_calls": 30, "beyond_budget": 0.0}
        out = fit(tmp_path, "run", server, *FAST, highest=100)
    rows = read_jsonl(out / "metrics.jsonl")
    calls = [row["reward/judge_calls"] for row in rows if "reward/judge_calls" in row]
    assert len(calls) == 2
    assert sum(calls) == 30 == len(stand_in.bodies)
    assert sum(row.get("reward/judge_prompt_tokens", 0) for row in rows) == 30 * 100
    assert sum(row.get("reward/judge_completion_tokens", 0) for row in rows) == 30 * 10
    assert sum(row.get("reward/judge_beyond_budget", 0) for row in rows) > 0
    assert stand_in.headers[0]["Authorization"] == "Bearer k-123456"
    assert not [path for path in out.rglob("*") if path.is_file() and b"k-123456" in path.read_bytes()]


def test_rows_are_scored_by_their_own_rubrics(tmp_path: Path) -> None:
    """The judge finds that each response is kind, not long, and 1 of 3 points are for the exact answer."""
    rubric = [{"criterion": "is kind"}, {"criterion": "is long"}, {"reward": "exact"}]
    rows = [{"prompt": f"{i} + 2 = ?", "answer": str(i + 2), "rubric": rubric} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serving(lambda body: json.dumps({"met": [True, False]})) as stand_in:
        server = {"url": stand_in.url, "model": "m"}
        reward = {"server": server, "rewards": {"exact": "ExactReward"}}
        task = {"path": f"{tmp_path}/rows.jsonl", "validation_split": 0.3}
        recipe = {"task": {"class_path": "Jsonl", "init_args": task}}
        recipe["reward"] = {"class_path": "RubricReward", "init_args": reward}
        (tmp_path / "rubric.yaml").write_text(yaml.safe_dump(recipe))
        words = ("--recipe=quickstart", f"--recipe={tmp_path}/rubric.yaml", *FAST, "--train.steps=1")
        assert main(["fit", *words, f"--out={tmp_path}/run"]) == 0
    rows = read_jsonl(tmp_path / "run" / "rollouts" / "step-00001.jsonl.gz")
    assert len(rows) == 16
    for row in rows:
        assert row["components"] == {"judged": 0.5, "exact": float(row["text"].strip() == row["answer"])}
        assert row["reward"] == pytest.approx((1 + row["components"]["exact"]) / 3)


@pytest.mark.slow
def test_a_judge_teaches_sums_and_a_constant_one_does_not(tmp_path: Path) -> None:
    """Right sums in the completions of the last 4 of 24 steps against the first 4, counted without the reward."""

    def growth(respond: Callable[[Body], float], name: str) -> float:
        with serving(lambda body: json.dumps({"score": respond(body)})) as stand_in:
            options = ("--train.steps=24", "--train.prompts_per_step=16", "--validation=null")
            out = fit(tmp_path, name, {"url": stand_in.url}, *options)
        files = sorted((out / "rollouts").glob("step-*.jsonl.gz"))
        shares = [fmean(last_number(row["text"]) == row["answer"] for row in read_jsonl(path)) for path in files]
        assert len(shares) == 24
        return fmean(shares[-4:]) - fmean(shares[:4])

    assert growth(lambda body: 10.0 * right(body), "judged") > 0.2
    assert abs(growth(lambda body: 5.0, "constant")) < 0.1

"""Rewards that call out or were learned, from `rlkit fit`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlkit.cli.main import main
from tests.conftest import FAST, read_jsonl
from tests.unit.rewards.test_rewards import classifier, url  # noqa: F401 (a fixture)


def fit(tmp_path: Path, reward: dict[str, Any], *more: str) -> list[dict[str, Any]]:
    """Train one step with a reward; give its rollouts."""
    (tmp_path / "reward.yaml").write_text(yaml.safe_dump({"reward": reward}))
    recipes = ("--recipe=quickstart", f"--recipe={tmp_path / 'reward.yaml'}", *more)
    assert main(["fit", *recipes, *FAST, "--train.steps=1", f"--out={tmp_path / 'out'}"]) == 0
    return read_jsonl(tmp_path / "out" / "rollouts" / "step-00001.jsonl.gz")


def test_model_service_router_and_batch_in_one_reward(tmp_path: Path, url: str) -> None:  # noqa: F811 (a fixture)
    path, _ = classifier(tmp_path / "rm", None)
    rewards = {
        "learned": {"class_path": "ModelReward", "init_args": {"path": path}},
        "served": {"class_path": "RemoteReward", "init_args": {"url": url, "batch_size": 3}},
        "routed": {"class_path": "Router", "init_args": {"rewards": {"math": "MathReward"}, "default": "math"}},
    }
    (tmp_path / "mine.py").write_text("def longest(solution_strs):\n    return [len(s) / 9 for s in solution_strs]\n")
    options = {"function": f"{tmp_path}/mine.py:longest", "allow_code": True}
    rewards["batch"] = {"class_path": "BatchReward", "init_args": options}
    weights = {"learned": 0.5, "served": 0.1, "batch": 0.0}
    rows = fit(tmp_path, {"class_path": "Composite", "init_args": {"rewards": rewards, "weights": weights}})
    assert len(rows) == 16
    for row in rows:
        values = row["components"]
        assert values["served"] == len(row["text"])
        assert values["batch"] == pytest.approx(len(row["text"]) / 9)
        assert values["routed"] == values["accuracy"]
        assert row["reward"] == pytest.approx(0.5 * values["learned"] + 0.1 * values["served"] + values["routed"])
    assert len({round(row["components"]["learned"], 6) for row in rows}) > 4


@pytest.mark.slow
def test_programs_are_graded_in_a_run(tmp_path: Path) -> None:
    """A program must print nothing: of the tiny policy's texts those that are Python without an error."""
    row = {"question": "What is 2 + 3?", "tests": json.dumps({"inputs": [""], "outputs": [""]})}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    options = {"path": f"{tmp_path}/rows.jsonl", "template": "{question}", "answer_field": "tests"}
    options |= {"validation_path": options["path"]}
    (tmp_path / "task.yaml").write_text(yaml.safe_dump({"task": {"class_path": "HFDataset", "init_args": options}}))
    reward = {"class_path": "CodeReward", "init_args": {"allow_code": True}}
    rows = fit(tmp_path, reward, f"--recipe={tmp_path / 'task.yaml'}", "--rollout.sampling.temperature=2")
    assert len(rows) == 16
    for row in rows:
        done = subprocess.run((sys.executable, "-c", row["text"]), capture_output=True, check=False)
        assert row["reward"] == row["components"]["accuracy"] == float(done.returncode == 0 and not done.stdout)
        assert row["components"]["compile_error"] == float(b"SyntaxError" in done.stderr)
    assert {row["reward"] for row in rows} == {0, 1}


def test_texts_of_recipe_and_row_end_turns_in_a_run(tmp_path: Path) -> None:
    """The recipe's text is the digit 1; rows add 2, or allow three tokens."""
    rows = [{"sampling": {"stop": "2"}}, {"sampling": {"max_tokens": 3}}]
    rows = [{"question": f"1{i} + 4 = ?", "answer": str(14 + i), **rows[i % 2]} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = {"path": f"{tmp_path}/rows.jsonl", "template": "{question}", "answer_field": "answer"}
    options |= {"validation_path": options["path"]}
    rollout = {"sampling_column": "sampling", "sampling": {"stop": ["1"], "temperature": 1.5}}
    recipe = {"task": {"class_path": "HFDataset", "init_args": options}, "rollout": rollout}
    (tmp_path / "stops.yaml").write_text(yaml.safe_dump(recipe))
    ends = set()
    for row in fit(tmp_path, {"class_path": "MathReward"}, f"--recipe={tmp_path / 'stops.yaml'}"):
        own = row["meta"]["sampling"]
        stops = ["1", own.get("stop", "1")]
        sampled = sum(row["mask"])
        assert not any(stop in row["text"][:-1] for stop in stops)
        if row["text"][-1:] in stops:
            assert row["stop"] == "stop"
            ends.add(row["text"][-1:])
        if "max_tokens" in own:
            assert sampled <= 3
            ends.add(row["stop"])
    assert {"1", "2", "length"} <= ends

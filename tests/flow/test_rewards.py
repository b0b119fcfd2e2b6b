"""Rewards that call out or were learned, from `rlkit fit`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlkit.cli.main import main
from tests.conftest import FAST, read_jsonl
from tests.unit.rewards.test_rewards import Service, classifier


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Service)
    Service.failures = 0
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()


def fit(tmp_path: Path, reward: dict[str, Any]) -> list[dict[str, Any]]:
    """Train one step with a reward; give its rollouts."""
    (tmp_path / "reward.yaml").write_text(yaml.safe_dump({"reward": reward}))
    recipes = ("--recipe=quickstart", f"--recipe={tmp_path / 'reward.yaml'}")
    assert main(["fit", *recipes, *FAST, "--train.steps=1", f"--out={tmp_path / 'out'}"]) == 0
    return read_jsonl(tmp_path / "out" / "rollouts" / "step-00001.jsonl.gz")


def test_model_service_router_and_batch_in_one_reward(tmp_path: Path, url: str) -> None:
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

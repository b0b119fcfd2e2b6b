"""Agents over HttpEngine: sessions sample what they do in the trainer's process, whatever dies. Structured answers."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rlkit_engine_http import HttpEngine

from rlkit import commands, hookimpl
from rlkit.registry import load_plugins
from rlkit.testing import random_model
from tests.conftest import read_jsonl
from tests.flow.test_agent_faults import check_logps
from tests.flow.test_agents import agent_file, python_agent
from tests.flow.test_conversations import fit
from tests.served import assert_restart_is_warned_of, fit_structured, killing

__all__ = ["killing"]

pytestmark = pytest.mark.slow

AGENT = '''
async def run(client, task):
    """Three turns by the official client, streamed."""
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    http = DefaultAsyncHttpxClient(verify=False)
    messages = []
    async with AsyncOpenAI(base_url=client.url + "/v1", api_key=client.key, http_client=http) as openai:
        for turn, text in enumerate((task.text, "2 + 2 = ?", "3 + 3 = ?")):
            messages.append({"role": "user", "content": text})
            async with openai.chat.completions.stream(model="policy", messages=messages) as stream:
                completion = await stream.get_final_completion()
            messages.append({"role": "assistant", "content": completion.choices[0].message.content})
'''

SERVED = ("--rollout.engine=HttpEngine", "--rollout.engine.servers=2")


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(__name__="tests", rlkit_register=hookimpl(lambda register: register(HttpEngine)))
    monkeypatch.setattr(commands, "load_plugins", lambda: load_plugins([("http", made)], entry_points=False))


def saved(folder: Path) -> list[dict[str, Any]]:
    """Return the rollouts of a run."""
    return [row for file in sorted((folder / "run" / "rollouts").glob("step-*.jsonl.gz")) for row in read_jsonl(file)]


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """Return the policies of each version, by their versions."""
    sync, models = HttpEngine.sync, {}

    async def recording(engine: HttpEngine, stream: Any, version: int) -> None:
        await sync(engine, stream, version)
        models[version] = copy.deepcopy(engine.runtime.policy).eval()

    monkeypatch.setattr(HttpEngine, "sync", recording)
    return models


def words(folder: Path, *options: str) -> tuple[str, ...]:
    """Return the words of a run whose steps have 64 sessions at once."""
    few = ("--train.prompts_per_step=8", "--rollout.group_size=8", "--validation=null", "--log.rollouts.limit=null")
    return "--recipe=quickstart", python_agent(agent_file(folder, AGENT)), *few, *options


def test_a_server_killed_in_a_turn_changes_none_of_64_sessions(tmp_path: Path, killing: list[int]) -> None:
    """Sessions are those in the trainer's process; what the killed server had is sampled again and committed once."""
    for folder in (tmp_path / "torch", tmp_path / "http"):
        folder.mkdir()
    fit(*words(tmp_path, "--train.steps=2"), cwd=tmp_path / "torch")
    rows, _ = fit(*words(tmp_path, "--train.steps=2"), *SERVED, cwd=tmp_path / "http")
    assert_restart_is_warned_of(tmp_path / "http" / "run")
    [in_flight] = killing
    assert rows[1]["engine/retried"] >= in_flight > 1
    assert [row["engine/restarts"] for row in rows] == [0, 1]
    for row in rows:
        assert row["rollout/failed"] == row["conversation/branches"] == row["conversation/tokens_retokenized"] == 0
        assert row["mismatch/mean"] < 1e-5
        assert row["mismatch/max"] < 1e-3
    in_process, served = saved(tmp_path / "torch"), saved(tmp_path / "http")
    assert len(in_process) == len(served) == 2 * 64
    for row, expected in zip(served, in_process, strict=True):
        for name in ("tokens", "mask", "versions", "turns", "conversation", "reward"):
            assert row[name] == expected[name]
        assert row["logps"] == pytest.approx(expected["logps"], abs=1e-3)
        assert sum(role == "assistant" for role, _, _ in row["turns"]) == 3


def test_a_server_killed_while_weights_change(tmp_path: Path, killing: list[int], models: dict[int, Any]) -> None:
    """Sampled ahead of the trainer, each token has the log-prob of the version that it names."""
    ahead = ("--rollout.max_staleness=2", "--correction={}", "--train.lr=0.001", "--train.warmup_steps=0")
    rows, _ = fit(*words(tmp_path, "--train.steps=3", *ahead), *SERVED, cwd=tmp_path)
    assert_restart_is_warned_of(tmp_path / "run")
    assert killing
    assert sum(row["rollout/failed"] for row in rows) == 0
    assert max(check_logps(tmp_path / "run", models, 3, largest_gap=2e-4)) > 0


def test_structured_answers_train(tmp_path: Path) -> None:
    fit_structured(random_model("qwen2"), tmp_path, "--rollout.engine=HttpEngine")

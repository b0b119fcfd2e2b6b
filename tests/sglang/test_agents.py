"""Agents on two real servers: 64 sessions at once, each token with the log-prob of the version that sampled it."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import read_jsonl
from tests.flow.test_agent_faults import TURNS
from tests.flow.test_agents import agent_file, python_agent
from tests.flow.test_conversations import fit
from tests.served import assert_restart_is_warned_of, killing

__all__ = ["killing"]


def test_64_sessions_are_exact_though_a_server_is_killed(tmp_path: Path, killing: list[int]) -> None:
    words = ("--recipe=quickstart", python_agent(agent_file(tmp_path, TURNS)), "--validation=null")
    few = ("--train.steps=2", "--train.prompts_per_step=8", "--rollout.group_size=8", "--log.rollouts.limit=null")
    rows, _ = fit(*words, *few, "--rollout.engine=SGLangServer", "--rollout.engine.servers=2", cwd=tmp_path)
    assert_restart_is_warned_of(tmp_path / "run")
    [in_flight] = killing
    assert rows[1]["engine/retried"] >= in_flight > 1
    assert [row["engine/restarts"] for row in rows] == [0, 1]
    for step, row in enumerate(rows):
        assert (row["rollout/samples"], row["rollout/failed"], row["conversation/agent_failed"]) == (64, 0, 0)
        assert row["mismatch/mean"] < 1e-5
        assert row["mismatch/max"] < 1e-3
        for saved in read_jsonl(tmp_path / "run" / "rollouts" / f"step-{step + 1:05d}.jsonl.gz"):
            sampled = {version for version, chosen in zip(saved["versions"], saved["mask"], strict=True) if chosen}
            assert sampled == {step}
            assert sum(role == "assistant" for role, _, _ in saved["turns"]) <= 3

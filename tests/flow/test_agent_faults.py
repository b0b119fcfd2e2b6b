"""Agents, the gateway and the trainer that die in the middle of a turn: only that rollout is lost, and is counted."""

from __future__ import annotations

import copy
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkit.engines import TorchEngine
from tests.conftest import read_jsonl
from tests.events import wait_until
from tests.flow.test_agents import ASK, SHORT, agent_file, command_agent, python_agent, read_command
from tests.flow.test_conversations import fit
from tests.flow.test_faults import start

pytestmark = pytest.mark.slow

TURNS = """
import asyncio
import sys

async def run(client, task):
    messages = []
    for text in (task.text, "2 + 2 = ?", "3 + 3 = ?"):
        messages.append({"role": "user", "content": text})
        messages.append(await client.chat(messages))
"""
STAYING = """
import time
open(os.path.join(os.environ["STARTED"], os.environ["OPENAI_API_KEY"]), "w").close()
time.sleep(600)
"""


def test_no_agent_outlives_a_killed_trainer(tmp_path: Path) -> None:
    agent = agent_file(tmp_path, ASK + STAYING)
    (tmp_path / "started").mkdir()
    command = command_agent(
        f"{sys.executable} {agent}", environment=f"{{STARTED: '{tmp_path / 'started'}'}}", sandbox=False
    )
    process = start(tmp_path, command, "--train.prompts_per_step=1", "--rollout.group_size=2", "--validation=null")
    wait_until(lambda: len(list((tmp_path / "started").iterdir())) == 2)
    assert len(agents(agent)) >= 2
    process.kill()
    assert process.wait(400) == -signal.SIGKILL
    wait_until(lambda: not agents(agent))


def agents(script: Path) -> list[str]:
    """Return the commands of the processes that run an agent, those of its supervisor included."""
    commands = [read_command(pid) for pid in filter(str.isdecimal, os.listdir("/proc")) if int(pid) != os.getpid()]
    return [command for command in commands if str(script) in command and "rlkit\0fit" not in command]


@pytest.mark.parametrize("staleness", [0, 2])
def test_each_token_has_the_log_prob_of_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    sync, models = TorchEngine.sync, {}

    async def recording(engine: TorchEngine, stream: Any, version: int) -> None:
        await sync(engine, stream, version)
        models[version] = copy.deepcopy(engine._runtime.policy).eval()

    monkeypatch.setattr(TorchEngine, "sync", recording)
    ahead = (f"--rollout.max_staleness={staleness}", "--correction={}") if staleness else ()
    agent = python_agent(agent_file(tmp_path, TURNS))
    grade = agent_file(tmp_path, "def grade(trajectory):\n    return float(sum(trajectory.tokens) % 2)", "reward.py")
    reward = f"--reward={{class_path: PythonReward, init_args: {{function: '{grade}:grade', allow_code: true}}}}"
    fast = ("--train.steps=4", "--train.lr=0.001", "--train.warmup_steps=0")
    options = (*SHORT, *fast, reward, "--log.rollouts.limit=null", *ahead)
    rows, _ = fit("--recipe=quickstart", agent, *options, cwd=tmp_path)
    ages = check_logps(tmp_path / "run", models, 4)
    assert max(ages) > 0 if staleness else ages == {0}
    assert sum(row["rollout/failed"] for row in rows) == 0


def check_logps(out: Path, models: Mapping[int, Any], steps: int, largest_gap: float = 1e-4) -> set[int]:
    """Check that each sampled token has the log-prob of its version's model; return how old tokens were in training.

    Args:
        out: The run.
        models: By version.
        steps: Of the run.
        largest_gap: Between a log-prob and the model's, in float32 after 100 tokens that it was not trained on.
    """
    gaps, ages = [], set()
    for step in range(1, steps + 1):
        for row in read_jsonl(out / "rollouts" / f"step-{step:05d}.jsonl.gz"):
            tokens, versions = torch.tensor(row["tokens"]), torch.tensor(row["versions"])
            assert ((versions >= 0) == torch.tensor(row["mask"]).bool()).all()
            for version in set(row["versions"]) - {-1}:
                with torch.no_grad():
                    logps = models[version](input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
                gap = logps.gather(1, tokens[1:, None])[:, 0] - torch.tensor(row["logps"][1:])
                gaps.append(gap[versions[1:] == version].abs())
                ages.add(step - 1 - version)
    assert torch.cat(gaps).mean() < 1e-5  # another version's are off by 0.1
    assert torch.cat(gaps).max() < largest_gap
    assert len(torch.cat(gaps)) > 200
    return ages

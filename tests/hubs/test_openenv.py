"""OpenEnv from `rlkit fit`: a real server's environment is learned, and its failures cost their rollouts only."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rlkit_env_openenv import OpenEnv

from rlkit.testing import check_environment
from tests.conftest import read_jsonl, rlkit_in_process
from tests.flow.test_conversations import fit
from tests.hubs.conftest import ENVIRONMENTS

PACKAGES = Path(sys.prefix) / "openenv"
"""A folder of OpenEnv's own, whose MCP is not that of verifiers."""
START_SECONDS = 60.0
PRIZE = re.compile("The prize is behind ([12])")
RECIPE = """
model: {path: tiny-tools}
task: {class_path: OpenEnvTask, init_args: {instructions: doors, resets: RESETS}}
environment: {class_path: OpenEnv, init_args: {url: URL, sessions: 64, timeout: 2}}
conversation: {turns: 4}
rollout: {group_size: 8, sampling: {max_tokens: 4}}
reward: EpisodeReward
advantage: GRPO
loss: ClipLoss
train: {steps: 1, prompts_per_step: 16, lr: 5.0e-4}
validation: null
fabric: {accelerator: cpu, devices: 1}
"""


@contextmanager
def serve(sessions: int) -> Iterator[str]:
    """Run a server of OpenEnv with the corridor of doors."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    command = (sys.executable, f"{ENVIRONMENTS}/doors.py", str(port), str(sessions))
    with subprocess.Popen(command, env=environment) as server:
        try:
            deadline = time.monotonic() + START_SECONDS
            while not listens(port):
                assert server.poll() is None, "the server has ended"
                assert time.monotonic() < deadline, "the server does not listen"
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve(64) as address:
        yield address


def write_recipe(folder: Path, url: str, resets: str) -> None:
    (folder / "recipe.yaml").write_text(RECIPE.replace("URL", url).replace("RESETS", resets))


def run(folder: Path, url: str, *options: str, resets: str = "null") -> tuple[list[dict[str, Any]], dict[str, Any]]:
    write_recipe(folder, url, resets)
    return fit("--recipe=recipe.yaml", *options, cwd=folder)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_policy_learns_to_open_doors(url: str, seed: int, tmp_path: Path) -> None:
    """Two rounds of a door that is named: 1 or 2. The policy begins with one right in four."""
    options = ("--train.steps=6", "--validation={limit: 16, samples: 4}", f"--train.seed={seed}")
    rows, validation = run(tmp_path, url, *options)
    assert validation["after"]["sampled_accuracy"] > validation["before"]["sampled_accuracy"] + 0.2
    for row in rows:
        assert row["rollout/failed"] == 0
        assert row["mismatch/max"] < 1e-4
    rollouts = read_jsonl(tmp_path / "run" / "rollouts" / "step-00006.jsonl.gz")
    for rollout in rollouts:
        prize, rewards = "", []
        for message in rollout["conversation"]:
            if message["role"] == "user":
                prize = (PRIZE.findall(message["content"]) or [prize])[0]
            else:
                rewards.append(float(message["content"].strip() == prize))
        assert rollout["turn_rewards"] == rewards
        assert rollout["reward"] == sum(rewards)
    assert any(rollout["reward"] == 2 for rollout in rollouts)


def test_troubles_of_a_server_cost_their_rollouts(url: str, tmp_path: Path) -> None:
    """The server hangs for longer than a step may last, or its environment raises."""
    resets = "[{}, {trouble: reset}, {trouble: step}, {trouble: hang}]"
    rows, _ = run(tmp_path, url, "--rollout.group_size=2", resets=resets)
    rollouts = read_jsonl(tmp_path / "run" / "rollouts" / "step-00001.jsonl.gz")
    part = "ParticipantError: OpenEnv of plugin 'env-openenv' (rlkit-env-openenv 0.1.0): "
    errors = {
        "reset": f"{part}ServerError: the server answered EXECUTION_ERROR: no corridor",
        "step": f"{part}ServerError: the server answered EXECUTION_ERROR: the door is stuck",
        "hang": f"{part}did not finish within 2 s",
    }
    troubles = [rollout["meta"]["reset"].get("trouble") for rollout in rollouts]
    full_messages = [rollout["error"] for rollout in rollouts]
    messages = [message and message.partition(" (/")[0] for message in full_messages]  # without the file and line
    outcomes = set(zip(troubles, messages, strict=True))
    assert set(errors.items()) | {(None, None)} <= outcomes
    assert outcomes <= {*errors.items(), *((trouble, None) for trouble in (None, "step", "hang"))}  # no action at all
    assert rows[0]["rollout/failed"] == sum(rollout["error"] is not None for rollout in rollouts)


def test_rollouts_of_a_server_that_dies_say_so(tmp_path: Path) -> None:
    with serve(64) as address:
        write_recipe(tmp_path, address, "[{trouble: die}]")
        done = rlkit_in_process("fit", "--recipe=recipe.yaml", "--rollout.group_size=2", "--out=run", cwd=tmp_path)
    assert done.returncode == 1
    assert "taught nothing: 32 of 32 conversations failed" in done.stderr
    for rollout in read_jsonl(tmp_path / "run" / "rollouts" / "step-00001.jsonl.gz"):
        assert re.search(f"OpenEnv .* ConnectionError: .*{address}", rollout["error"])


def test_equal_seeds_play_equal_episodes(url: str) -> None:
    check_environment(lambda: OpenEnv(url, sessions=8))

"""Roles in an agent's session, from `rlkit fit`: RAE for a game, GRPO for a proposer and its solvers."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from rlkit.cli.main import main
from tests.conftest import read_jsonl
from tests.flow.test_agents import agent_file, python_agent

SHORT = ("--train.prompts_per_step=8", "--train.schedule=Constant", "--train.warmup_steps=0", "--save.every=1")


def fit(out: Path, *options: str) -> list[dict[str, float]]:
    assert main(["fit", *options, f"--out={out}"]) == 0
    return read_jsonl(out / "metrics.jsonl")


def samples(out: Path, step: int) -> list[list[dict[str, Any]]]:
    """Return the samples of each rollout of a step."""
    rows = read_jsonl(out / "rollouts" / f"step-{step:05d}.jsonl.gz")
    return [[row, *row["branches"]] for row in rows]


@pytest.mark.slow
def test_baselines_of_roles_survive_a_resume(tmp_path: Path) -> None:
    metrics = fit(tmp_path / "run", "--recipe=quick_selfplay", *SHORT, "--train.steps=3")
    baselines = {"first": 0.0, "second": 0.0}
    for step in (1, 2, 3):
        returns = defaultdict(list)
        for players in samples(tmp_path / "run", step):
            assert [player["role"] for player in players] == ["first", "second"]
            assert players[0]["turn_rewards"][0] == -players[1]["turn_rewards"][0]
            for player in players:
                [reward] = player["turn_rewards"]
                returns[player["role"]].append(reward)
                assert player["advantages"][-1] == pytest.approx(reward - baselines[player["role"]], abs=1e-5)
        for role, values in returns.items():
            assert metrics[step - 1][f"reward/role/{role}"] == pytest.approx(fmean(values))
            assert metrics[step - 1][f"advantage/baseline/{role}"] == pytest.approx(baselines[role], abs=1e-6)
            baselines[role] = 0.95**8 * baselines[role] + (1 - 0.95**8) * fmean(values)
    assert metrics[2]["advantage/baseline/first"] != 0
    fit(tmp_path / "parts", "--recipe=quick_selfplay", *SHORT, "--train.steps=2")
    resumed = fit(tmp_path / "parts", "--recipe=quick_selfplay", *SHORT, "--train.steps=3", "--resume=auto")
    same = [name for name in metrics[2] if name.startswith(("advantage/", "reward/", "policy/"))]
    assert {name: resumed[-1][name] for name in same} == {name: metrics[2][name] for name in same}
    assert main(["replay", str(tmp_path / "run"), "--allow-code", "--step=3", "--phase=learn"]) == 0


@pytest.mark.slow
def test_solutions_are_compared_within_their_problem(tmp_path: Path) -> None:
    options = ("--train.steps=2", "--advantage.scale_by_std=false")
    metrics = fit(tmp_path / "run", "--recipe=quick_proposer", *SHORT, *options)
    assert metrics[0]["conversation/forks"] == metrics[0]["conversation/branches"] == 0
    rollouts = samples(tmp_path / "run", 1)
    proposals = defaultdict(list)
    for proposer, *_ in rollouts:
        proposals[proposer["group"]].append(proposer["turn_rewards"][0])
    texts = []
    for proposer, *solvers in rollouts:
        [reward] = proposer["turn_rewards"]
        assert proposer["role"] == "proposer"
        expected = reward - fmean(proposals[proposer["group"]])
        assert proposer["advantages"][-1] == pytest.approx(expected, abs=1e-5)
        rewards = [solver["turn_rewards"][0] for solver in solvers]
        assert reward == (1 - abs(2 * fmean(rewards) - 1) if solvers else -1)
        for solver in solvers:
            assert solver["role"] == "solver"
            assert solver["advantages"][-1] == pytest.approx(solver["turn_rewards"][0] - fmean(rewards), abs=1e-5)
        texts.append({solver["text"] for solver in solvers})
    assert any(len(own) > 1 for own in texts)  # equal questions are sampled apart
    assert main(["replay", str(tmp_path / "run"), "--allow-code", "--step=2", "--phase=learn"]) == 0


def test_a_role_without_a_reward_fails_its_rollout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = """
    async def run(client, task):
        await client.role("a player").chat(task.prompt.messages)
    """
    agent = python_agent(agent_file(tmp_path, source))
    assert main(["fit", "--recipe=quick_selfplay", *SHORT, agent, f"--out={tmp_path / 'run'}"]) == 1
    assert "role 'a_player' has reward None, expected a finite number: the agent sets it" in capsys.readouterr().err


def test_roles_need_an_agent(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--recipe=quickstart", "--advantage=RAE"]) == 2
    assert "advantage RAE needs roles, but the recipe has no `agent:`; add one" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["quick_selfplay", "quick_proposer"])
def test_the_policy_learns_from_playing_with_itself(
    tmp_path: Path, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counted apart from the game: sums that it completes greedily and by sampling, 0.69 and 0.41 before."""
    assert main(["fit", f"--recipe={recipe}", "--train.steps=10", f"--out={tmp_path / 'run'}"]) == 0
    capsys.readouterr()
    words = ("--recipe=quickstart", f"--model.path={tmp_path / 'run' / 'final'}", "--validation.samples=4", "--json")
    assert main(["validate", *words]) == 0
    accuracy = json.loads(capsys.readouterr().out)
    assert accuracy["accuracy"] > 0.72
    assert accuracy["sampled_accuracy"] > 0.47

"""Harbor's tasks from `rlkit fit`: an agent solves them in its sandbox, and their tests write the reward."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import read_jsonl
from tests.flow.test_agents import agent_file, command_agent
from tests.flow.test_conversations import fit
from tests.unit.tasks.test_harbor import write_task

pytestmark = pytest.mark.slow

SOLVER = """
import json, os, urllib.request

task = open("TASK.md").read()
body = {"model": os.environ["RLKIT_MODEL"], "messages": [{"role": "user", "content": task}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()

os.makedirs("tests")  # none of the task's own
with open("tests/test.sh", "w") as file:
    file.write("echo 1 > /logs/verifier/reward.txt")
with open("/app/sum.txt", "w") as file:  # right for one task alone
    file.write("3")
print(os.getcwd(), open("/app/numbers.txt").read(), os.path.exists("/tests"), os.path.exists("/logs"))
"""
REWARD = (
    "--reward={class_path: CommandReward, init_args: {command: 'bash /tests/test.sh', allow_code: true, "
    "number: /logs/verifier/reward.txt}}"
)


def test_tests_of_a_task_reward_its_solution(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks" / "one-two")
    fail_unless_four = '[ "$(cat /app/sum.txt)" = 4 ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt\n'
    write_task(tmp_path / "tasks" / "two-two", **{"environment/numbers.txt": "2 2", "tests/check.sh": fail_unless_four})
    agent = command_agent(f"python {agent_file(tmp_path, SOLVER)}")
    task = f"--task={{class_path: Harbor, init_args: {{path: {tmp_path / 'tasks'}}}}}"
    short = ("--train.steps=1", "--train.prompts_per_step=2", "--rollout.group_size=2", "--validation=null")
    rows, _ = fit("--recipe=quickstart", task, agent, REWARD, *short, cwd=tmp_path)
    assert rows[0]["rollout/failed"] == rows[0]["conversation/agent_failed"] == rows[0]["reward/failed"] == 0
    rollouts = read_jsonl(tmp_path / "run" / "rollouts" / "step-00001.jsonl.gz")
    outcomes = [(row["meta"]["files"]["numbers.txt"], row["reward"], row["agent"]["output"]) for row in rollouts]
    right, wrong = ("1 2", 1.0, "/app 1 2 False False\n"), ("2 2", 0.0, "/app 2 2 False False\n")
    assert sorted(outcomes) == [right, right, wrong, wrong]

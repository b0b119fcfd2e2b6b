"""Agents from `rlkit fit`: what they sampled is learned, token for token, and what they do wrong ends no run."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from rlkit.cli.main import main
from tests.conftest import read_jsonl, rlkit_in_process
from tests.flow.test_conversations import fit

pytestmark = pytest.mark.slow

FORKING = '''
async def run(client, task):
    """A plan, two sub-agents, an edited history, and a turn that is cut."""
    import asyncio
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI

    def user(text):
        return {"role": "user", "content": text}

    plan = await client.chat([user(task.text)])
    async with AsyncOpenAI(base_url=client.url + "/v1", api_key=client.key) as openai:
        async with AsyncAnthropic(base_url=client.url, api_key=client.key) as anthropic:
            chat = openai.chat.completions.create(model="policy", messages=[user("1 + 1 = ?")])
            messages = anthropic.messages.create(model="policy", max_tokens=50, messages=[user("2 + 2 = ?")])
            one, two = await asyncio.gather(chat, messages)
            one_more = [user("1 + 1 = ?"), {"role": "assistant", "content": one.choices[0].message.content}]
            await openai.chat.completions.create(model="policy", messages=[*one_more, user("3 + 3 = ?")], stream=True)
    await client.chat([user(task.text)], max_tokens=2)
    return (await client.chat([user(task.text), plan, user(task.text)]))["content"]
'''


def agent_file(folder: Path, source: str, name: str = "agent.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    return path


def python_agent(path: Path, options: str = "") -> str:
    return f"--agent={{class_path: PythonAgent, init_args: {{function: '{path}:run', allow_code: true{options}}}}}"


def command_agent(command: str, **options: object) -> str:
    listed = "".join(f", {name}: {value}" for name, value in options.items())
    return f"--agent={{class_path: CommandAgent, init_args: {{command: '{command}', allow_code: true{listed}}}}}"


SHORT = ("--train.steps=2", "--train.prompts_per_step=2", "--rollout.group_size=2", "--validation=null")


@pytest.mark.parametrize("staleness", [(), ("--rollout.max_staleness=1", "--correction={}")], ids=["", "ahead"])
def test_a_forking_agent_is_trained_token_for_token(tmp_path: Path, staleness: tuple[str, ...]) -> None:
    agent = python_agent(agent_file(tmp_path, FORKING))
    rows, _ = fit("--recipe=quickstart", agent, *SHORT, *staleness, cwd=tmp_path)
    for row in rows:
        assert row["rollout/failed"] == row["conversation/agent_failed"] == 0
        assert row["conversation/branches"] == 3 * 4  # two sub-agents and the cut turn, beside the plan's conversation
        assert row["conversation/forks"] == 3 * 4
        assert row["groups/no_signal"] <= 1
        if not staleness:
            assert row["mismatch/max"] < 1e-5
    saved = read_jsonl(tmp_path / "run" / "rollouts" / "step-00001.jsonl.gz")
    assert [role for role, _, _ in saved[0]["turns"]] == ["user", "assistant", "user", "assistant"]


LOOKING = '''
async def run(client, task):
    """Look at the task's picture, then at a rotated one, in two conversations."""
    import base64, io
    from openai import AsyncOpenAI
    from PIL import Image

    buffer = io.BytesIO()
    Image.open(task.folder / "picture-1.png").rotate(90).save(buffer, "PNG")
    uri = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": "And now?"}]
    turned = {"role": "user", "content": parts}
    prompt = task.prompt.messages
    first = await client.chat(prompt)
    async with AsyncOpenAI(base_url=client.url + "/v1", api_key=client.key) as openai:
        await openai.chat.completions.create(model="policy", messages=[turned])
    return (await client.chat([*prompt, first, turned]))["content"]
'''


def test_an_agent_shows_the_policy_pictures(tmp_path: Path) -> None:
    """The trainer's log-probs equal the engine's in all samples, with the pictures of the prompt and of the agent."""
    agent = python_agent(agent_file(tmp_path, LOOKING))
    rows, _ = fit("--recipe=quick_image", agent, *SHORT, "--rollout.sampling.max_tokens=24", cwd=tmp_path)
    for row in rows:
        assert row["rollout/failed"] == row["conversation/agent_failed"] == 0
        assert row["mismatch/max"] < 2e-5
    saved = read_jsonl(tmp_path / "run" / "rollouts" / "step-00001.jsonl.gz")
    names = {
        part["image"]
        for row in saved
        for sample in (row, *row["branches"])
        for message in (*row["messages"], *sample["conversation"])
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image"
    }
    written = {f"media/{path.name}" for path in (tmp_path / "run" / "rollouts" / "media").iterdir()}
    assert len(names) == 4  # of two prompts
    assert names <= written


def test_a_step_with_forks_is_learned_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The saved rollouts hold the sessions: each sampled token once under a mask, and gradients equal to the bit."""
    agent = python_agent(agent_file(tmp_path, FORKING))
    grade = "def grade(trajectory):\n    return sum(map(ord, trajectory.text)) % 7\n"
    reward = agent_file(tmp_path, grade, "reward.py")
    fit(
        "--recipe=quickstart",
        agent,
        f"--reward={{class_path: PythonReward, init_args: {{function: '{reward}:grade', allow_code: true}}}}",
        *SHORT,
        "--save.every=1",
        cwd=tmp_path,
    )
    saved = read_jsonl(tmp_path / "run" / "rollouts" / "step-00002.jsonl.gz")
    assert len({row["reward"] for row in saved}) > 1
    for row in saved:
        assert row["agent"]["status"] == 0
        assert [branch["fork"] for branch in row["branches"]] == [None] * 3  # the sub-agents and the cut turn
        samples = (row, *row["branches"])
        positions = [position for sample in samples for position in sample["positions"]]
        assert sorted(positions) == list(range(len(positions)))
        assert len(positions) in (5, 6)  # the stream that nobody reads may be ended before it is committed
        for sample in samples:
            assert len(sample["advantages"]) == len(sample["tokens"]) == len(sample["mask"])
    capsys.readouterr()
    words = [
        "replay",
        str(tmp_path / "run"),
        "--allow-code",
        "--step=2",
        "--phase=learn",
        f"--out={tmp_path / 'again'}",
    ]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "metrics: the same in the 1 step that both have" in said
    assert "answers: the same in all rollouts that both have" in said
    assert "tensors: the same in step-000002" in said


def test_quick_agent_learns(tmp_path: Path) -> None:
    """An unmodified agent of openai-agents: its rollouts are linear, so each is one sample."""
    rows, validation = fit("--recipe=quick_agent", "--train.steps=14", cwd=tmp_path)
    assert validation["after"]["accuracy"] > validation["before"]["accuracy"] + 0.1
    assert sum(row["rollout/failed"] + row["conversation/branches"] for row in rows) == 0
    assert max(row["mismatch/max"] for row in rows) < 1e-3
    calls = [row["conversation/tool_calls"] / 128 for row in rows]
    assert sum(calls[-4:]) / 4 > sum(calls[:2]) / 2 + 0.2


ASK = """
import json, os, urllib.request
body = {"model": "policy", "messages": [{"role": "user", "content": os.environ["RLKIT_TASK"]}]}
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)).read()
"""


def read_command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def test_a_command_that_never_asks_is_reported(tmp_path: Path) -> None:
    options = (command_agent("no-such-program --flag"), *SHORT, "--train.steps=1")
    done = rlkit_in_process("fit", "--recipe=quickstart", *options, "--out=run", cwd=tmp_path)
    assert "it asked the policy for no turn and ended with status 127" in done.stdout + done.stderr
    assert "no-such-program: No such file or directory" in done.stdout + done.stderr


def test_a_reward_reads_the_folder_and_the_status(tmp_path: Path) -> None:
    agent = agent_file(tmp_path, ASK + "open('note', 'w').write('done')\nprint('said')\nraise SystemExit(3)")
    reward = agent_file(
        tmp_path,
        """
        import os
        def grade(agent, trajectory):
            note = open(os.path.join(agent["folder"], "note")).read()
            task = open(os.path.join(agent["folder"], "TASK.md")).read()
            right = (note, agent["status"], agent["output"]) == ("done", 3, "said\\n")
            return float(right and task == trajectory.prompt.messages[0]["content"])
        """,
        "reward.py",
    )
    rows, _ = fit(
        "--recipe=quickstart",
        command_agent(f"{sys.executable} {agent}", keep=tmp_path / "kept"),
        f"--reward={{class_path: PythonReward, init_args: {{function: '{reward}:grade', allow_code: true}}}}",
        *SHORT,
        cwd=tmp_path,
    )
    assert [row["reward/mean"] for row in rows] == [1.0, 1.0]
    assert len(list((tmp_path / "kept").iterdir())) == 8

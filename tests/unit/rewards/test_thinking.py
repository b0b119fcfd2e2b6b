"""No reward or user takes an answer in thinking for one, also where the prompt has begun the thinking."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rlkit_authors.models import TEMPLATE, build_tokenizer
from rlkit_judges.prompts import response_of

from rlkit.interactions import Retry
from rlkit.interfaces.environment import Environment, Observation
from rlkit.interfaces.interaction import Interaction, Reply
from rlkit.interfaces.tool import State
from rlkit.records.folder import json_lines
from rlkit.records.rows import as_row, read_rows
from rlkit.rewards import CodeReward, ExactReward, MathReward, QAReward, RemoteReward
from rlkit.rollout.collect import ConversationSetup, collect
from rlkit.rollout.conversation import Limits
from rlkit.rollout.participants import Participants
from rlkit.rollout.template import ChatTemplate
from rlkit.testing import ExampleRuntime, FakeEngine, example_trajectory
from rlkit.types import Message, Prompt, Sampling, Trajectory

PROMPT = Prompt("p", [{"role": "user", "content": "?"}], "4")
REWARDS = [
    (ExactReward(), "4"),
    (MathReward(), r"\boxed{4}"),
    (MathReward(), "#### 4"),
    (MathReward(), "The answer is 4."),
    (QAReward(), "<answer>4</answer>"),
    (QAReward("subem", tag=False), "It is 4."),
]


@pytest.mark.parametrize(("reward", "answer"), REWARDS)
def test_an_answer_in_thinking_earns_nothing(reward: ExactReward | MathReward | QAReward, answer: str) -> None:
    def paid(text: str, opened: str = "") -> float | None:
        return reward.grade(replace(example_trajectory(text), opened_thinking=opened)).reward

    assert paid(f"<think>5</think>\n{answer}") == paid(f"5</think>\n{answer}", "<think>") == 1.0
    assert paid(answer) == 1.0
    for text in (f"<think>{answer}</think>", f"<think>{answer}", f"<think>{answer}</think>\n5", f"{answer}</think>"):
        assert paid(text) == 0.0, text
    assert paid(answer, "<think>") == paid(answer, "[THINK]") == paid(f"{answer}</think>", "<think>") == 0.0
    control = reward.control(replace(example_trajectory(answer), opened_thinking="<think>"))
    assert control is None or reward.grade(control).reward == 1.0


def test_a_service_gets_the_answer_without_thinking(monkeypatch: pytest.MonkeyPatch) -> None:
    reward, items = RemoteReward("http://127.0.0.1:1"), []

    async def post_json(path: str, body: bytes, seconds: float) -> dict[str, object]:
        items.extend(json.loads(body)["items"])
        return {"scores": [0.0] * 3}

    monkeypatch.setattr(reward._http, "post_json", post_json)
    samples = [example_trajectory(text) for text in ("5</think>4", "<think>5</think>4", "4")]
    samples[0].opened_thinking = samples[2].opened_thinking = "<think>"
    asyncio.run(reward.score(samples))
    assert [item["text"] for item in items] == ["4", "4", ""]
    assert [item["completion"] for item in items] == ["<think>5</think>4", "<think>5</think>4", "<think>4"]


def test_a_program_in_thinking_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    reward, programs = CodeReward(allow_code=True), []

    async def run(program: str, tests: object) -> str:
        programs.append(program)
        return "0"

    monkeypatch.setattr(reward._runner, "run", run)
    code = "```python\nx = 4\n```"
    texts = [f"<think>{code}", f"<think>no</think>{code}", code]
    samples = [example_trajectory(text, '["assert x == 4"]') for text in texts]
    samples[2].opened_thinking = "<think>"
    asyncio.run(reward.score(samples))
    assert programs == ["", "x = 4\n", ""]


def sampled(
    text: str,
    begin: str,
    special: Sequence[str] = (),
    participants: Participants | None = None,
    prompt: Prompt = PROMPT,
) -> Trajectory:
    """Return a sample by a policy whose template begins thinking, and whose tokenizer has further special tokens."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(list(special), special_tokens=True)
    tokenizer.chat_template = TEMPLATE.replace("assistant\n{% endif", f"assistant\n{begin}{{% endif")
    engine = FakeEngine([text])
    engine.bind(SimpleNamespace(tokenizer=tokenizer))  # type: ignore[arg-type]
    template = ChatTemplate(tokenizer, {tokenizer.eos_token_id})
    talk: dict[str, Any] = {} if participants is None else {"participants": participants, "limits": Limits(turns=2)}
    setup = ConversationSetup(engine, template, Sampling(max_tokens=99), 1, seed=0, step=0, **talk)

    async def finish(group: list[Trajectory]) -> None:
        return None

    [trajectory] = asyncio.run(collect(setup, [(0, PROMPT)], finish))
    return trajectory


@pytest.mark.parametrize(
    ("begin", "text", "paid"),
    [
        ("<think>\n", r"so \boxed{4}", 0.0),
        ("<think>\n", r"5</think>\boxed{4}", 1.0),
        ("<think>\n\n</think>\n", r"so \boxed{4}", 1.0),
        ("", r"[THINK]so \boxed{4}", 0.0),
        ("", r"[THINK]5[/THINK]so \boxed{4}", 1.0),
        ("", r"<|channel|>analysis<|message|>\boxed{4}<|end|>", 0.0),
        ("", r"<|channel|>analysis<|message|>5<|end|><|start|>assistant<|channel|>final<|message|>\boxed{4}", 1.0),
    ],
)
def test_a_prompt_and_special_tokens_begin_thinking(tmp_path: Path, begin: str, text: str, paid: float) -> None:
    special = ["[THINK]", "[/THINK]", "<|channel|>", "<|message|>", "<|start|>", "<|end|>"]
    trajectory = sampled(text, begin, special)
    (tmp_path / "rows.jsonl.gz").write_bytes(json_lines([as_row(trajectory)]))
    [row] = read_rows(tmp_path / "rows.jsonl.gz")
    assert "<|end|>" not in trajectory.text
    assert [MathReward().grade(sample).reward for sample in (trajectory, row.trajectory)] == [paid, paid]


class Attentive(Interaction):
    """Notes the texts that it reads, and speaks of thinking."""

    def __init__(self) -> None:
        self.read: list[list[object]] = []

    async def reply(self, messages: Sequence[Message], state: State) -> Reply:
        self.read.append([message["content"] for message in messages])
        return Reply([{"role": "user", "content": "Sure?"}], done=False)


class Player(Environment):
    """Notes the actions."""

    def __init__(self) -> None:
        self.actions: list[str] = []

    async def reset(self, prompt: Prompt, seed: int, state: State) -> str:
        return "?"

    async def step(self, action: str, state: State) -> Observation:
        self.actions.append(action)
        return Observation("Again.")


def test_users_and_environments_read_where_thinking_has_begun() -> None:
    user, game = Attentive(), Player()
    sample = sampled("so 4", "<think>\n", participants=Participants(interaction=user))
    assert user.read == [["?", "<think>so 4"], ["?", "<think>so 4", "Sure?", "<think>so 4"]]
    assert sample.messages[-2]["content"] == sample.text == "so 4"  # what the policy wrote
    assert response_of(sample) == "[assistant]\n\n\n[user]\nSure?\n\n[assistant]\n\n\n[user]\nSure?"
    sampled("5</think>4", "<think>\n", participants=Participants(environment=game))
    assert game.actions == ["<think>5</think>4"] * 2


@pytest.mark.parametrize(
    ("begin", "text", "turns"),
    [("", "#### 4", 1), ("<think>\n", "#### 4", 2), ("<think>\n", "5</think>#### 4", 1), ("[THINK]", "#### 4", 2)],
)
def test_an_answer_in_thinking_is_answered_as_wrong(begin: str, text: str, turns: int) -> None:
    user = Retry()
    user.bind(ExampleRuntime())
    sample = sampled(text, begin, participants=Participants(interaction=user))
    assert len(sample.turn_rewards) == turns

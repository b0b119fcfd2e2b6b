"""No reward that looks for an answer pays one in thinking, also where the prompt has begun it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rlkit_authors.models import TEMPLATE, build_tokenizer

from rlkit.records.folder import json_lines
from rlkit.records.rows import as_row, read_rows
from rlkit.rewards import CodeReward, ExactReward, MathReward, QAReward, RemoteReward
from rlkit.rollout.collect import ConversationSetup, collect
from rlkit.rollout.template import ChatTemplate
from rlkit.testing import FakeEngine, example_trajectory
from rlkit.types import Prompt, Sampling, Trajectory

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


def sampled(text: str, begin: str, special: list[str]) -> Trajectory:
    """Return a sample by a policy whose template begins thinking, and whose tokenizer has further special tokens."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.chat_template = TEMPLATE.replace("assistant\n{% endif", f"assistant\n{begin}{{% endif")
    engine = FakeEngine([text])
    engine.bind(SimpleNamespace(tokenizer=tokenizer))  # type: ignore[arg-type]
    template = ChatTemplate(tokenizer, {tokenizer.eos_token_id})
    setup = ConversationSetup(engine, template, Sampling(max_tokens=99), 1, seed=0, step=0)

    async def finish(group: list[Trajectory]) -> None:
        return None

    [trajectory] = asyncio.run(collect(setup, [(0, Prompt("p", [{"role": "user", "content": "?"}], "4"))], finish))
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

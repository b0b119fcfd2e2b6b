"""What the host of an agent's rollouts does around them: templates, warnings, roles, folders."""

from __future__ import annotations

import asyncio
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rlkit_authors.models import build_tokenizer

from rlkit.base.errors import PartError
from rlkit.interfaces.agent import Agent, AgentClient, AgentResult, AgentTask
from rlkit.interfaces.fields import Field
from rlkit.interfaces.gateway import Sample
from rlkit.recipe import ConversationLimits
from rlkit.rollout.agents import AgentHost, SessionRole, TemplateBackend, _assign_roles
from rlkit.rollout.collect import BusyTimer
from rlkit.rollout.conversation import Limits
from rlkit.rollout.template import ChatTemplate
from rlkit.types import (
    AgentSpan,
    Completion,
    Message,
    Prompt,
    Request,
    SampleKey,
    Sampling,
    StopReason,
    Trajectory,
    Turn,
)

PROMPT = Prompt("p", [{"role": "user", "content": "?"}], None)


def host(**options: Any) -> AgentHost:
    agent: Any = SimpleNamespace(keep=None, **options)
    dialogue: Any = SimpleNamespace(template=SimpleNamespace(codec=SimpleNamespace(turn=lambda ids, special: str(ids))))
    limits: Any = None
    return AgentHost(agent, dialogue, limits)


@pytest.mark.parametrize(("prompt", "asked", "budget"), [(90, None, 5), (90, 3, 3), (98, None, 2), (98, 3, 2)])
def test_a_completion_has_room_and_a_budget(prompt: int, asked: int | None, budget: int) -> None:
    """The least of the recipe's 5 tokens, of what the agent asks for, and of what is left of a context of 100."""
    requests: list[Request] = []

    async def generate(request: Request) -> Completion:
        requests.append(request)
        return Completion([1], [-0.5], [0], StopReason.STOP)

    setup: Any = SimpleNamespace(
        engine=SimpleNamespace(generate=generate), gate=None, timer=BusyTimer(), sampling=Sampling(max_tokens=5),
        asks_routes=False,
        limits=Limits(context=100), template=SimpleNamespace(reader=None),
    )  # fmt: skip
    dialogue: Any = SimpleNamespace()
    asyncio.run(TemplateBackend(setup, dialogue, None, SampleKey(0, 1, "0/p", 2)).sample([1] * prompt, asked, "a"))
    assert [(request.sampling.max_tokens, request.continues) for request in requests] == [(budget, True)]


def test_templates_of_the_last_sets_of_tools_are_kept() -> None:
    tokenizer = build_tokenizer()
    dialogue: Any = SimpleNamespace(template=ChatTemplate(tokenizer, {tokenizer.eos_token_id}))
    setup: Any = SimpleNamespace(limits=Limits(context=64))
    backend = TemplateBackend(setup, dialogue, None, SampleKey(0, 1, "0/p", 2))

    def of(number: int) -> ChatTemplate:
        return backend._template([{"type": "function", "function": {"name": f"tool{number}", "parameters": {}}}])

    first, second, *_ = [of(number) for number in range(8)]
    assert of(0) is first
    of(8)  # the ninth set replaces the one that was used the longest ago
    assert of(0) is first
    assert of(1) is not second
    assert backend._template(()) is dialogue.template


def test_each_of_the_first_problems_is_shown_once() -> None:
    shown: list[str] = []
    agents = host()
    agents.note = shown.append
    for number in (1, 1, 2, 3, 4, 5, 6, 1):
        agents._warn(f"problem {number}")
    assert [line.split(";")[0] for line in shown] == [f"warning: problem {number}" for number in range(1, 6)]


@pytest.mark.parametrize(("reward", "is_problem"), [(0.5, False), (0, False), (None, True), (nan, True), (inf, True)])
def test_a_role_needs_a_finite_reward(reward: float | None, is_problem: bool) -> None:
    """Its reward stands at its last turn; the agent's own samples keep theirs."""
    role = SessionRole("judge", None, reward)  # type: ignore[arg-type]
    own, judged = (Trajectory(PROMPT, 0, [], [], [], [], StopReason.STOP, turn_rewards=[0.25, 0.25]) for _ in range(2))
    own.span.branches = [judged]
    samples: Any = [SimpleNamespace(speaker=0), SimpleNamespace(speaker=1)]
    _assign_roles(own, samples, [role])
    assert (own.span.role, own.turn_rewards) == ("", [0.25, 0.25])
    assert (judged.span.role, judged.span.speaker, judged.turn_rewards) == (
        "judge",
        1,
        [0.25, 0.0 if is_problem else reward],
    )
    assert bool(own.error) == is_problem
    assert own.error is None or "role 'judge' has reward" in own.error


def sample(speaker: int, messages: list[Message]) -> Sample:
    turns = [Turn("user", 0, 1), Turn("assistant", 1, 2)]
    return Sample(
        [1, 2],
        [False, True],
        [0.0, -1.0],
        [-1, 0],
        turns,
        messages,
        StopReason.STOP,
        [2],
        None,
        [0],
        [],
        [(), ()],
        speaker,
    )


def test_the_main_sample_has_the_others_as_branches() -> None:
    """Two samples of one speaker are one branch more than speakers; the prompt's messages come first, once."""
    answer: Message = {"role": "assistant", "content": "!"}
    main = host()._trajectory(PROMPT, [sample(0, [answer]), sample(0, []), sample(1, [])], {"turns": 3})
    assert main.messages == [*PROMPT.messages, answer]
    assert (main.counts, len(main.span.branches), main.turn_rewards) == ({"turns": 3, "branches": 1}, 2, [0.0])
    same = host()._trajectory(PROMPT, [sample(0, [*PROMPT.messages, answer])], {})
    assert same.messages == main.messages
    assert host()._trajectory(PROMPT, [], {}).stop is StopReason.ERROR


@pytest.mark.parametrize("keep", [False, True])
def test_a_folder_is_removed_or_kept_after_its_score(tmp_path: Path, keep: bool) -> None:
    folder = tmp_path / "rollout"
    folder.mkdir()
    (folder / "log").write_text("text")
    agents = host()
    agents.agent.keep = str(tmp_path / "kept" / "here") if keep else None
    scored = Trajectory(PROMPT, 0, [], [], [], [], StopReason.STOP, span=AgentSpan({"folder": str(folder)}))
    asyncio.run(agents.release([Trajectory(PROMPT, 0, [], [], [], [], StopReason.STOP), scored]))
    assert not folder.exists()
    assert (tmp_path / "kept" / "here" / "rollout" / "log").exists() == keep


class Effortful(Agent):
    """Fills how much effort a rollout took, by row."""

    fills = (Field("effort", by="row"),)

    async def run(self, task: AgentTask, client: AgentClient) -> AgentResult:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("filled", "error"),
    [
        ({"effort": 0.5}, None),
        ({"effort": nan}, "'effort' with nan, expected finite numbers of float32"),
        (5, "by name"),
    ],
)
def test_all_samples_of_a_rollout_have_what_the_agent_fills(
    monkeypatch: pytest.MonkeyPatch, filled: Any, error: str | None
) -> None:
    agents = host()
    agents.agent, agents.limits = Effortful(), ConversationLimits()
    session: Any = SimpleNamespace(samples=lambda: [sample(0, []), sample(0, [])], counts={}, forks=1, error=None)

    async def run(*_: object) -> tuple[AgentResult, Any]:
        return AgentResult(fields=filled), SimpleNamespace(session=session, roles=[])

    monkeypatch.setattr(agents, "_run", run)
    agents.dialogue.participants = SimpleNamespace(parser=None)
    setup: Any = SimpleNamespace(limits=Limits(), fields={})
    rollout = asyncio.run(agents._rollout(setup, PROMPT, SampleKey(0, 1, "0/p", 0), Path("folder")))
    if error is None:
        assert rollout.error is None
        assert [float(row.fields["effort"]) for row in rollout.samples] == [0.5, 0.5]
    else:
        assert "Effortful of tests" in str(rollout.error)
        assert error in str(rollout.error)
    filled = {"other": 1.0}
    with pytest.raises(PartError, match="Effortful of tests: `run` filled the field 'other', expected .*: effort"):
        asyncio.run(agents._rollout(setup, PROMPT, SampleKey(0, 1, "0/p", 0), Path("folder")))

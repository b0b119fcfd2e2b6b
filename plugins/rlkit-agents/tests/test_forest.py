"""Histories as agents write them, and the trees and samples that they become."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlkit_agents.forest import Attachment, Forest
from rlkit_agents.request import Call, ChatRequest, RequestError, assistant, name_results
from rlkit_agents.session import AgentSession

from rlkit.base.errors import RolloutError
from rlkit.interfaces.fields import Field, Filled, assemble
from rlkit.interfaces.gateway import Sample
from rlkit.types import Completion, Fork, Message, StopReason
from tests.events import until
from tests.fake_policy import END, ask, session_of, tree, user

History = Callable[[AgentSession], Awaitable[object]]

TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "sub", "description": "", "parameters": {"type": "object"}}}
CALLS = (
    '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    '<tool_call>{"name": "sub", "arguments": {"a": 3}}</tool_call>'
)


def result(call: str, text: str) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": call}


async def ask_named(session: AgentSession, *messages: Message, **options: Any) -> Message:
    return await ask(session, *name_results(messages), **options)


async def one_turn(session: AgentSession) -> None:
    await ask(session, user("a"))


async def linear(session: AgentSession) -> None:
    messages = [user("a")]
    for text in "bcd":
        messages += [await ask(session, *messages), user(text)]
    await ask(session, *messages)


async def a_system_prompt(session: AgentSession) -> None:
    system = {"role": "system", "content": "s"}
    first = await ask(session, system, user("a"))
    await ask(session, system, user("a"), first, user("b"))


async def another_system_prompt(session: AgentSession) -> None:
    first = await ask(session, {"role": "system", "content": "s"}, user("a"))
    await ask(session, {"role": "system", "content": "t"}, user("a"), first, user("b"))


async def blanks_around_an_answer(session: AgentSession) -> None:
    first = await ask(session, user("a"))
    await ask(session, user("a"), assistant(f"\n{first['content']} "), user("b"))


async def an_edited_answer(session: AgentSession) -> None:
    await ask(session, user("a"))
    await ask(session, user("a"), assistant("edited"), user("b"))


async def an_edited_first_message(session: AgentSession) -> None:
    first = await ask(session, user("a"))
    await ask(session, user("A"), first, user("b"))


async def a_later_edit(session: AgentSession) -> None:
    first = await ask(session, user("a"))
    await ask(session, user("a"), first, user("b"))
    await ask(session, user("a"), first, user("B"))


async def compaction(session: AgentSession) -> None:
    messages = [user("a")]
    for text in "bc":
        messages += [await ask(session, *messages), user(text)]
    summary = await ask(session, *messages[:-1], user("summarize"))
    await ask(session, user(f"summary: {summary['content']}"))


async def compaction_that_keeps_the_start(session: AgentSession) -> None:
    first = await ask(session, user("a"))
    second = await ask(session, user("a"), first, user("b"))
    await ask(session, user("a"), first, user("b"), second, user("c"))
    await ask(session, user("a"), first, user("summary of b and c"))


async def parallel_sub_agents(session: AgentSession) -> None:
    plan = await ask(session, user("plan"))
    left, right = await asyncio.gather(ask(session, user("left")), ask(session, user("right")))
    await asyncio.gather(
        ask(session, user("left"), left, user("more")),
        ask(session, user("right"), right, user("more")),
    )
    await ask(session, user("plan"), plan, user(f"{left['content']} {right['content']}"))


async def sub_agents_that_share_a_start(session: AgentSession) -> None:
    first = await ask(session, user("a"))
    await asyncio.gather(*(ask(session, user("a"), first, user(text)) for text in "bcd"))


async def a_first_turn_sent_again(session: AgentSession) -> None:
    await ask(session, user("a"))
    await ask(session, user("a"))


async def a_later_turn_sent_again_goes_on_with_the_latest(session: AgentSession) -> None:
    first = await ask(session, user("a"))
    session.backend.texts += ["same", "same"]  # type: ignore[attr-defined]
    second = await ask(session, user("a"), first, user("b"))
    await ask(session, user("a"), first, user("b"))
    await ask(session, user("a"), first, user("b"), second, user("c"))


async def interleaved_conversations(session: AgentSession) -> None:
    first, other = await ask(session, user("a")), await ask(session, user("x"))
    await ask(session, user("a"), first, user("b"))
    await ask(session, user("x"), other, user("y"))


async def the_same_words_in_two_conversations(session: AgentSession) -> None:
    session.backend.texts += ["same", "same"]  # type: ignore[attr-defined]
    first, other = await ask(session, user("a")), await ask(session, user("x"))
    await ask(session, user("x"), other, user("go on"))
    await ask(session, user("a"), first, user("go on"))


async def two_messages_at_once(session: AgentSession) -> None:
    first = await ask(session, user("a"))
    await ask(session, user("a"), first, user("b"), user("c"))


async def a_foreign_answer_after_a_turn(session: AgentSession) -> None:
    first = await ask(session, user("a"))
    await ask(session, user("a"), first, user("b"), assistant("by another model"), user("c"))


async def other_tools(session: AgentSession) -> None:
    first = await ask(session, user("a"), tools=[TOOL])
    await ask(session, user("a"), first, user("b"), tools=[OTHER])


async def tools_that_come_later(session: AgentSession) -> None:
    first = await ask(session, user("a"))
    await ask(session, user("a"), first, user("b"), tools=[TOOL])


async def calls_and_results(session: AgentSession) -> None:
    session.backend.texts.append(CALLS)  # type: ignore[attr-defined]
    first = await ask(session, user("a"), tools=[TOOL, OTHER])
    ids = [call["id"] for call in first["tool_calls"]]
    results = [result(ids[0], "3"), result(ids[1], "-1")]
    second = await ask_named(session, user("a"), first, *results, tools=[TOOL, OTHER])
    await ask_named(session, user("a"), first, *results, second, user("b"), tools=[TOOL, OTHER])


async def calls_with_ids_of_the_agent(session: AgentSession) -> None:
    session.backend.texts.append(CALLS)  # type: ignore[attr-defined]
    await ask(session, user("a"), tools=[TOOL, OTHER])
    first = assistant("", [Call("x", "add", {"b": 2, "a": 1}), Call("y", "sub", {"a": 3})])
    await ask_named(session, user("a"), first, result("x", "3"), result("y", "-1"), tools=[TOOL, OTHER])


async def results_in_another_order(session: AgentSession) -> None:
    session.backend.texts.append(CALLS)  # type: ignore[attr-defined]
    first = await ask(session, user("a"), tools=[TOOL, OTHER])
    ids = [call["id"] for call in first["tool_calls"]]
    results = [result(ids[0], "3"), result(ids[1], "-1")]
    second = await ask_named(session, user("a"), first, *results, tools=[TOOL, OTHER])
    await ask_named(session, user("a"), first, *results[::-1], second, user("b"), tools=[TOOL, OTHER])


async def other_arguments(session: AgentSession) -> None:
    session.backend.texts.append(CALLS)  # type: ignore[attr-defined]
    await ask(session, user("a"), tools=[TOOL, OTHER])
    first = assistant("", [Call("x", "add", {"a": 1, "b": 99}), Call("y", "sub", {"a": 3})])
    await ask_named(session, user("a"), first, result("x", "3"), result("y", "-1"), tools=[TOOL, OTHER])


async def a_turn_cut_by_length(session: AgentSession) -> None:
    first = await ask(session, user("a"), max_tokens=3)
    await ask(session, user("a"), first, user("b"))


async def a_cut_turn_after_a_complete_one(session: AgentSession) -> None:
    first = await ask(session, user("a"))
    second = await ask(session, user("a"), first, user("b"), max_tokens=3)
    await ask(session, user("a"), first, user("b"), second, user("c"))


async def a_template_that_renders_anew(session: AgentSession) -> None:
    first = await ask(session, user("a"))
    session.backend.no_deltas = True  # type: ignore[attr-defined]
    await ask(session, user("a"), first, user("b"))


async def reasoning_that_the_agent_drops(session: AgentSession) -> None:
    session.backend.texts.append("<think>so</think>yes")  # type: ignore[attr-defined]
    await ask(session, user("a"))
    await ask(session, user("a"), assistant("yes"), user("b"))


async def a_window_that_slides(session: AgentSession) -> None:
    messages = [user("a")]
    for text in "bcd":
        messages += [await ask(session, *messages[-3:]), user(text)]


async def requests_that_are_joined(session: AgentSession) -> None:
    policy: Any = session.backend
    policy.hold = asyncio.Event()
    asking = [asyncio.ensure_future(ask(session, user("a"))) for _ in range(2)]
    await until(lambda: session.counts["requests_joined"] == 1)
    policy.hold.set()
    first, _ = await asyncio.gather(*asking)
    await ask(session, user("a"), first, user("b"))


async def a_retry_of_an_answered_request(session: AgentSession) -> None:
    await ask(session, user("a"))
    retried = await session.answer(ChatRequest([user("a")]), retry=True)
    await ask(session, user("a"), retried.message(), user("b"))


async def a_dropped_request(session: AgentSession) -> None:
    first = await ask(session, user("a"))
    session.backend.hold = asyncio.Event()  # type: ignore[attr-defined]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ask(session, user("a"), first, user("b")), 0.01)
    session.backend.hold = None  # type: ignore[attr-defined]
    await ask(session, user("a"), first, user("b"))


async def a_failed_request(session: AgentSession) -> None:
    first = await ask(session, user("a"))
    session.backend.fail = lambda: RolloutError("a server has died")  # type: ignore[attr-defined]
    with pytest.raises(RequestError, match="a server has died"):
        await ask(session, user("a"), first, user("b"))
    session.backend.fail = lambda: None  # type: ignore[attr-defined]
    await ask(session, user("a"), first, user("b"))


async def a_schema_with_other_key_order(session: AgentSession) -> None:
    first = await ask(session, user("a"), tools=[TOOL])
    function = dict(reversed(TOOL["function"].items()))
    await ask(session, user("a"), first, user("b"), tools=[{"function": function, "type": "function"}])


async def a_sub_agent_with_the_same_task(session: AgentSession) -> None:
    session.backend.texts += ["same", "same"]  # type: ignore[attr-defined]
    first = await ask(session, user("a"))
    second = await ask(session, user("a"))
    await ask(session, user("a"), second, user("b"))
    await ask(session, user("a"), first, user("b"))


async def a_stop_text_that_the_agent_does_not_see(session: AgentSession) -> None:
    session.backend.texts.append("one!two")  # type: ignore[attr-defined]
    first = await ask(session, user("a"), stop=("!",))
    await ask(session, user("a"), first, user("b"))


async def an_empty_answer(session: AgentSession) -> None:
    session.backend.texts.append("")  # type: ignore[attr-defined]
    first = await ask(session, user("a"))
    await ask(session, user("a"), first, user("b"))


HISTORIES: dict[History, tuple[list[int | None], int]] = {
    one_turn: ([None], 0),
    linear: ([None, 0, 1, 2], 0),
    a_system_prompt: ([None, 0], 0),
    another_system_prompt: ([None, None], 1),
    blanks_around_an_answer: ([None, 0], 0),
    an_edited_answer: ([None, None], 1),
    an_edited_first_message: ([None, None], 1),
    a_later_edit: ([None, 0, 0], 1),
    compaction: ([None, 0, 1, None], 1),
    compaction_that_keeps_the_start: ([None, 0, 1, 0], 1),
    parallel_sub_agents: ([None, None, None, 1, 2, 0], 2),
    sub_agents_that_share_a_start: ([None, 0, 0, 0], 2),
    a_first_turn_sent_again: ([None, None], 1),
    a_later_turn_sent_again_goes_on_with_the_latest: ([None, 0, 0, 2], 1),
    interleaved_conversations: ([None, None, 0, 1], 1),
    the_same_words_in_two_conversations: ([None, None, 1, 0], 1),
    two_messages_at_once: ([None, 0], 0),
    a_foreign_answer_after_a_turn: ([None, 0], 0),
    other_tools: ([None, None], 1),
    tools_that_come_later: ([None, None], 1),
    calls_and_results: ([None, 0, 1], 0),
    calls_with_ids_of_the_agent: ([None, 0], 0),
    results_in_another_order: ([None, 0, 0], 1),
    other_arguments: ([None, None], 1),
    a_turn_cut_by_length: ([None, None], 1),
    a_cut_turn_after_a_complete_one: ([None, 0, 0], 1),
    a_template_that_renders_anew: ([None, None], 1),
    reasoning_that_the_agent_drops: ([None, None], 1),
    a_window_that_slides: ([None, 0, None], 1),
    requests_that_are_joined: ([None, 0], 0),
    a_retry_of_an_answered_request: ([None, 0], 0),
    a_dropped_request: ([None, 0], 0),
    a_failed_request: ([None, 0], 0),
    a_schema_with_other_key_order: ([None, 0], 0),
    a_sub_agent_with_the_same_task: ([None, None, 1, 1], 2),
    a_stop_text_that_the_agent_does_not_see: ([None, 0], 0),
    an_empty_answer: ([None, 0], 0),
}
"""Each history with the parents of its turns, and the number of forks."""

RETOKENIZED = {
    a_turn_cut_by_length: 3,
    a_cut_turn_after_a_complete_one: 3,
    a_template_that_renders_anew: len("turn 1" + END),
}
"""Sampled tokens that a later request renders, since their turn cannot be continued."""


def check_samples(session: AgentSession) -> list[Sample]:
    """Check that the mask covers each sampled token once and no other, with its log-prob and its version."""
    samples = session.forest.samples()
    trained = [
        (tuple(sample.tokens[turn.start : turn.end]), tuple(sample.logps[turn.start : turn.end]))
        for sample in samples
        for turn in sample.turns
        if turn.role == "assistant"
    ]
    completions = [(tuple(n.completion.tokens), tuple(n.completion.logps)) for n in session.forest.nodes]
    assert sorted(trained) == sorted(completions)
    for sample in samples:
        assert len(sample.tokens) == len(sample.mask) == len(sample.logps) == len(sample.versions)
        assert [version >= 0 for version in sample.versions] == sample.mask
        assert all(logp == 0.0 for logp, sampled in zip(sample.logps, sample.mask, strict=True) if not sampled)
        starts = [0, *(turn.end for turn in sample.turns)]
        assert [turn.start for turn in sample.turns] == starts[:-1]
        assert starts[-1] == len(sample.tokens)
        for turn in sample.turns:
            assert set(sample.mask[turn.start : turn.end]) == {turn.role == "assistant"}
    return samples


@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history.__name__)
def test_a_history_grows_its_tree(history: History) -> None:
    session = session_of()
    asyncio.run(history(session))  # type: ignore[arg-type]
    parents, forks = HISTORIES[history]
    assert tree(session.forest) == parents
    assert session.forest.forks == forks
    assert session.counts["tokens_retokenized"] == RETOKENIZED.get(history, 0)
    leaves = set(range(len(parents))) - set(parents)
    assert len(check_samples(session)) == len(leaves)


def test_a_prompt_is_the_parents_ids_and_the_new_messages() -> None:
    session = session_of("one", "two")
    asyncio.run(linear(session))
    sampled = session.backend.sampled  # type: ignore[attr-defined]
    assert sampled[0] == f"[]user:a{END}assistant:"
    assert sampled[1] == f"{sampled[0]}one{END}user:b{END}assistant:"
    assert sampled[2] == f"{sampled[1]}two{END}user:c{END}assistant:"


def test_tokens_that_are_rendered_again_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no turn's ids were ever taken verbatim: the second request renders turn 1, the third one turns 1 and 2."""
    monkeypatch.setattr(Forest, "attach", lambda *_: Attachment(None, 0))
    session = session_of()
    asyncio.run(linear(session))
    assert session.counts["tokens_retokenized"] == (1 + 2 + 3) * len("turn 1" + END)


def test_a_shared_turn_is_trained_on_in_the_first_sample_only() -> None:
    session = session_of("one", "two", "three")
    asyncio.run(a_later_edit(session))
    main, other = check_samples(session)
    ends = ["".join(map(chr, sample.tokens)) for sample in (main, other)]
    assert ends[0].endswith(f"user:B{END}assistant:three{END}")
    assert ends[1].endswith(f"user:b{END}assistant:two{END}")
    assert sum(main.mask) == len("one") + len("three") + 2
    assert sum(other.mask) == len("two") + 1
    assert [turn.role for turn in other.turns] == ["user", "assistant"]


def test_a_branch_says_where_it_leaves_which_sample() -> None:
    """Turns 0 and 1, then 2 after 0, then 3 after 1: the main sample is 0, 1, 3, and 2 leaves it after turn 0."""

    async def history(session: AgentSession) -> None:
        first = await ask(session, user("a"))
        second = await ask(session, user("a"), first, user("b"))
        await ask(session, user("a"), first, user("B"))
        await ask(session, user("x"))
        await ask(session, user("a"), first, user("b"), second, user("c"))

    session = session_of()
    asyncio.run(history(session))
    main, other, alone = session.forest.samples()
    start = len(f"[]user:a{END}assistant:turn 1{END}")
    assert [sample.fork for sample in (main, other, alone)] == [None, Fork(0, start), None]
    assert other.tokens[:start] == main.tokens[:start]
    assert [sample.positions for sample in (main, other, alone)] == [[0, 1, 4], [2], [3]]


def test_a_branch_has_the_fields_of_all_its_tokens() -> None:
    """The engine fills the id of each token of a request and its completion, those of shared turns included."""
    session = session_of("one", "two", "three")
    sample_turn = session.backend.sample

    async def fill(tokens: Sequence[int], *arguments: Any) -> Completion:
        completion = await sample_turn(tokens, *arguments)
        ids = torch.tensor([*tokens, *completion.tokens])
        return replace(completion, filled=[Filled({"ids": ids}, len(completion.tokens))])

    session.backend.sample = fill  # type: ignore[assignment,method-assign]
    asyncio.run(a_later_edit(session))
    main, branch = session.forest.samples()
    assert branch.fork is not None
    for sample in (main, branch):
        declared = {"ids": Field("ids", "int64", padding=-1)}
        assert assemble(declared, sample.filled, len(sample.tokens))["ids"].tolist() == sample.tokens


@pytest.mark.parametrize("last", [1, 2])
def test_a_roles_latest_conversation_is_its_first_sample(last: int) -> None:
    """Whoever asks last: the first role has edited its history, and its first sample is what the reward scores."""
    session = session_of("one", "two", "three")

    async def run() -> None:
        requests = [(1, "a"), (1, "A"), (2, "b")] if last == 2 else [(2, "b"), (1, "a"), (1, "A")]
        for speaker, text in requests:
            await ask(session, user(text), speaker=speaker)

    asyncio.run(run())
    samples = session.forest.samples()
    assert [(sample.speaker, sample.messages[0]["content"]) for sample in samples] == [(1, "A"), (1, "a"), (2, "b")]


def test_a_cut_turn_stays_a_sample() -> None:
    session = session_of("a long turn")
    asyncio.run(a_turn_cut_by_length(session))
    main, cut = check_samples(session)
    assert (cut.stop, main.stop) == (StopReason.LENGTH, StopReason.STOP)
    assert "".join(map(chr, cut.last)) == "a l"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from("abc"), st.booleans()), max_size=12))
def test_no_turn_is_lost_or_trained_on_twice(steps: list[tuple[int, int, str, bool]]) -> None:
    """Conversations that are continued from anywhere, rewritten, or cut by length."""

    async def play() -> AgentSession:
        session = session_of(*(f"t{i % 4}" for i in range(20)))
        conversations: list[list[Message]] = [[]]
        for which, cut, text, edit in steps:
            messages = list(conversations[which % len(conversations)])
            messages = messages[: 2 * (cut % (len(messages) // 2 + 1))]
            if edit and messages:
                messages[0] = user(f"edited {text}")
            messages.append(user(text))
            turn = await ask(session, *messages, max_tokens=2 if cut == 0 else None)
            conversations.append([*messages, turn])
        return session

    session = asyncio.run(play())
    check_samples(session)
    for node in session.forest.nodes:
        if node.parent is not None:
            assert session.forest.nodes[node.parent].extendable
            path = session.forest.ids(session.forest.nodes[node.parent])
            assert session.forest.ids(node)[: len(path)] == path
        read = session.forest.ids(node)[: -len(node.completion.tokens)]
        assert "".join(map(chr, read)) == session.backend.sampled[node.index]  # type: ignore[attr-defined]
    for before, after in itertools.pairwise(session.forest.nodes):
        assert before.index + 1 == after.index

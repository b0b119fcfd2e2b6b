"""Random conversations by the official clients of three APIs: the same trees, token for token."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from test_forest import check_samples

from rlkit.interfaces.gateway import Sample, SessionLimits
from rlkit.types import Completion
from tests.agent_clients import Ask, Asker, ChatAsker, MessagesAsker, ResponsesAsker, Said, edited, serving
from tests.fake_policy import FakePolicy

CONVERSATIONS = 20
TEXTS = [
    "yes",
    " no\n",
    "ünïcode \N{GRINNING FACE} " + "long " * 20,
    'One. <tool_call>{"name": "add", "arguments": {"add": 1}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"add": 1}}</tool_call>'
    '<tool_call>{"name": "sub", "arguments": {"b": [2, {"x": "y"}], "a": null}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"add": </tool_call>',
    "",
]
Tree = tuple[list[tuple[int | None, tuple[int, ...], Completion]], list[Sample]]
"""Each turn's parent, the ids that it read since then and what was sampled, and the samples."""


def next_said(rng: random.Random, answer: Said) -> Said:
    """Return what an agent says after an answer: results of its calls, in any order, or a user's text, or both."""
    results = [(call, rng.choice("12")) for call, _, _ in answer.calls]
    if rng.random() < 0.3:
        results.reverse()
    text = rng.choice(["go on", "why?"]) if not results or rng.random() < 0.3 else ""
    return Said("user", text, results=tuple(results))


def next_ask(rng: random.Random, asked: list[tuple[Ask, Said]]) -> Ask:
    """Return the next request of a conversation: it goes on, forks, is edited, sent again, or retried."""
    before, answer = asked[-1] if rng.random() < 0.7 else rng.choice(asked)
    kind = rng.choices(["go on", "edit", "send again", "retry", "tools", "system", "blanks"], [10, 2, 1, 1, 1, 1, 1])[0]
    if kind in ("send again", "retry"):
        return replace(before, retry=kind == "retry")
    said = (*before.said, answer, next_said(rng, answer))
    following = replace(before, said=said, retry=False, max_tokens=rng.choice([500] * 9 + [3]))
    if kind == "edit":
        users = [i for i, message in enumerate(said) if message.text]
        return replace(following, said=edited(said, rng.choice(users), "edited"))
    if kind == "blanks" and answer.text:
        return replace(following, said=edited(said, len(said) - 2, f"\n {answer.text} "))
    if kind == "tools":
        return replace(following, tools=rng.choice([(), ("add",), ("sub", "add")]))
    return replace(following, system="t") if kind == "system" else following


async def hold(asker: Asker, seed: int, coins: random.Random) -> Tree:
    """Hold a conversation that the seed determines; the coins choose how the client writes it."""
    rng = random.Random(seed)
    session = asker.gateway.open(FakePolicy(*rng.choices(TEXTS, k=9)), SessionLimits())
    ask = Ask((Said("user", "start"),), rng.choice(["", "s"]), rng.choice([(), ("add", "sub")]))
    asked: list[tuple[Ask, Said]] = []
    for _ in range(rng.randint(2, 4)):
        blocks, stream, recall = (coins.random() < 0.5 for _ in range(3))
        asked.append((ask, await asker.ask(session, replace(ask, blocks=blocks, stream=stream, recall=recall))))
        ask = next_ask(rng, asked)
    samples = check_samples(session)
    return [(node.parent, node.context, node.completion) for node in session.forest.nodes], samples


async def hold_all(kind: type[Asker]) -> list[Tree]:
    async with serving() as (gateway, _):
        asker, coins = kind(gateway), random.Random(kind.__name__)
        async with asker.client:
            return [await hold(asker, seed, coins) for seed in range(CONVERSATIONS)]


def test_random_conversations_grow_the_same_trees_in_all_apis() -> None:
    by_chat, by_messages, by_responses = (
        asyncio.run(hold_all(kind)) for kind in (ChatAsker, MessagesAsker, ResponsesAsker)
    )
    assert by_chat == by_messages
    assert by_chat == by_responses
    parents = [[parent for parent, *_ in nodes] for nodes, _ in by_chat]
    assert sum(len(nodes) for nodes in parents) > 2 * CONVERSATIONS
    assert len({tuple(nodes) for nodes in parents}) > CONVERSATIONS / 5

"""The gateway over HTTP: the providers' own clients, malformed requests, and agents that mean ill."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from rlkit.base.errors import RolloutError
from rlkit.gateway import server
from rlkit.gateway.server import Gateway
from rlkit.gateway.session import AgentSession, SessionLimits
from tests.unit.gateway.fake import FakePolicy, tree

CALLS = (
    'Both. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    '<tool_call>{"name": "sub", "arguments": {"b": [2, "x"]}}</tool_call>'
)
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("add", "sub")]
MESSAGE_TOOLS: Any = [{"name": name, "input_schema": SCHEMA} for name in ("add", "sub")]
RESPONSE_TOOLS: Any = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("add", "sub")]


@asynccontextmanager
async def serving(*texts: str, limits: SessionLimits | None = None) -> AsyncIterator[tuple[Gateway, AgentSession]]:
    gateway = Gateway()
    await gateway.start()
    try:
        yield gateway, gateway.open(FakePolicy(*texts), limits or SessionLimits())
    finally:
        await gateway.close()


def run(
    test: Callable[[Gateway, AgentSession], Awaitable[object]], *texts: str, limits: SessionLimits | None = None
) -> Any:
    async def serve() -> object:
        async with serving(*texts, limits=limits) as (gateway, session):
            return await test(gateway, session)

    return asyncio.run(serve())


def chat_client(gateway: Gateway, key: str, **options: Any) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, http_client=http, **options)


def message_client(gateway: Gateway, key: str) -> anthropic.AsyncAnthropic:
    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    return anthropic.AsyncAnthropic(base_url=gateway.url, api_key=key, http_client=http)


@pytest.mark.parametrize("stream", [False, True])
def test_the_chat_client_reads_texts_calls_and_results(stream: bool) -> None:
    async def test(gateway: Gateway, session: AgentSession) -> None:
        async with chat_client(gateway, session.id) as client:
            messages: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": "go"}]
            if stream:
                async with client.chat.completions.stream(model="m", messages=messages, tools=CHAT_TOOLS) as events:
                    async for _ in events:
                        pass
                    answer: Any = await events.get_final_completion()
            else:
                answer = await client.chat.completions.create(model="m", messages=messages, tools=CHAT_TOOLS)
            [choice] = answer.choices
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == "Both."
            calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
            assert calls == [("add", {"a": 1}), ("sub", {"b": [2, "x"]})]
            messages.append(choice.message.model_dump(exclude_none=True))
            messages += [{"role": "tool", "tool_call_id": c.id, "content": "3"} for c in choice.message.tool_calls]
            final = await client.chat.completions.create(model="m", messages=messages, tools=CHAT_TOOLS, stop="!")
            assert final.choices[0].message.content == "done"
            assert final.choices[0].finish_reason == "stop"
            assert final.usage is not None
            assert final.usage.completion_tokens == len("done!")
            assert (await client.models.list()).data[0].id == "policy"
        assert tree(session.forest) == [None, 0]

    run(test, CALLS, "done! and more")


@pytest.mark.parametrize("stream", [False, True])
def test_the_messages_client_reads_texts_calls_and_results(stream: bool) -> None:
    async def test(gateway: Gateway, session: AgentSession) -> None:
        async with message_client(gateway, session.id) as client:
            messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "go"}]}]
            options: Any = {"model": "m", "max_tokens": 500, "system": "s", "tools": MESSAGE_TOOLS}
            if stream:
                async with client.messages.stream(messages=messages, **options) as events:
                    answer = await events.get_final_message()
            else:
                answer = await client.messages.create(messages=messages, **options)
            assert answer.stop_reason == "tool_use"
            text, *uses = answer.content
            assert text.type == "text"
            assert text.text == "Both."
            assert [(use.name, use.input) for use in uses if use.type == "tool_use"] == [
                ("add", {"a": 1}),
                ("sub", {"b": [2, "x"]}),
            ]
            results = [{"type": "tool_result", "tool_use_id": use.id, "content": "3"} for use in uses]  # type: ignore[union-attr]
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
            final = await client.messages.create(messages=messages, stop_sequences=["!"], **options)
            assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "!")
            assert final.usage.output_tokens == len("done!")
            counted = await client.messages.count_tokens(model="m", messages=messages[:1])
            assert counted.input_tokens == len("[]user:go\x03assistant:")
        assert tree(session.forest) == [None, 0]

    run(test, CALLS, "done! and more")


@pytest.mark.parametrize("stream", [False, True])
def test_the_responses_client_reads_texts_calls_and_results(stream: bool) -> None:
    async def test(gateway: Gateway, session: AgentSession) -> None:
        async with chat_client(gateway, session.id) as client:
            items: list[Any] = [{"role": "user", "content": "go"}]
            options: Any = {"model": "m", "instructions": "s", "tools": RESPONSE_TOOLS}
            if stream:
                async with client.responses.stream(input=items, **options) as events:
                    answer: Any = await events.get_final_response()
            else:
                answer = await client.responses.create(input=items, **options)
            assert (answer.output_text, answer.status) == ("Both.", "completed")
            calls = [item for item in answer.output if item.type == "function_call"]
            assert [(call.name, json.loads(call.arguments)) for call in calls] == [
                ("add", {"a": 1}),
                ("sub", {"b": [2, "x"]}),
            ]
            results: Any = [{"type": "function_call_output", "call_id": c.call_id, "output": "3"} for c in calls]
            second = await client.responses.create(input=results, previous_response_id=answer.id, **options)
            assert second.output_text == "done"
            output = [item.model_dump(exclude_none=True) for item in answer.output]
            await client.responses.create(
                input=[*items, *output, *results, {"role": "user", "content": "x"}], **options
            )
        assert tree(session.forest) == [None, 0, 0]

    run(test, CALLS, "done", "third")


def test_both_dialects_grow_the_same_tree() -> None:
    """40 conversations, each continued, edited or begun again, by a client of each provider."""

    async def play(gateway: Gateway, session: AgentSession, chat: bool) -> list[int | None]:
        numbers = random.Random(7)
        known: list[list[Any]] = [[]]
        async with chat_client(gateway, session.id) as openai_client, message_client(gateway, session.id) as other:
            for _ in range(40):
                messages = [*numbers.choice(known), {"role": "user", "content": numbers.choice("ab")}]
                if chat:
                    answer = await openai_client.chat.completions.create(model="m", messages=messages)
                    text = answer.choices[0].message.content or ""
                else:
                    reply = await other.messages.create(model="m", max_tokens=99, messages=messages)
                    text = "".join(block.text for block in reply.content if block.type == "text")
                known.append([*messages, {"role": "assistant", "content": text}])
        return tree(session.forest)

    texts = [f"t{i % 3}" for i in range(40)]
    trees = [run(lambda g, s, chat=chat: play(g, s, chat), *texts) for chat in (True, False)]
    assert trees[0] == trees[1]
    assert len(set(trees[0])) > 5


USER = {"role": "user", "content": "a"}
MALFORMED: list[tuple[str, Any, int, str]] = [
    ("chat/completions", b"", 400, "no JSON"),
    ("chat/completions", b"{", 400, "no JSON"),
    ("chat/completions", b"[" * 100_000, 400, "no JSON"),
    ("chat/completions", b"\xff\xfe{}", 400, "no JSON"),
    ("chat/completions", b"[]", 400, "no JSON object"),
    ("chat/completions", b"null", 400, "no JSON object"),
    ("chat/completions", {}, 400, "no 'messages'"),
    ("chat/completions", {"messages": [USER]}, 400, "no 'model'"),
    ("chat/completions", {"model": "m", "messages": []}, 400, "messages is empty"),
    ("chat/completions", {"model": "m", "messages": {}}, 400, "expected a list"),
    ("chat/completions", {"model": "m", "messages": ["a"]}, 400, "expected an object"),
    ("chat/completions", {"model": "m", "messages": [{}]}, 400, "the role None"),
    ("chat/completions", {"model": "m", "messages": [{"role": "god", "content": "a"}]}, 400, "the role 'god'"),
    ("chat/completions", {"model": "m", "messages": [{"role": "user", "content": 1}]}, 400, "expected a list"),
    ("chat/completions", {"model": "m", "messages": [{"role": "user", "content": ["a"]}]}, 400, "expected an object"),
    ("chat/completions", {"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400,
     "'image_url'"),
    ("chat/completions", {"model": "m", "messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400,
     "expected a string"),
    ("chat/completions", {"model": "m", "messages": [{"role": "tool", "content": "a"}]}, 400, "tool_call_id"),
    ("chat/completions", {"model": "m", "messages": [{"role": "tool", "content": "a", "tool_call_id": "x"}]}, 400,
     "no call before it"),
    ("chat/completions", {"model": "m", "messages": [USER, {"role": "assistant", "tool_calls": [{}]}, USER]}, 400,
     "the function of a tool call"),
    ("chat/completions", {"model": "m", "messages": [USER, {"role": "assistant", "tool_calls": [
        {"id": "x", "function": {"name": "f", "arguments": "{"}}]}, USER]}, 400, "are no JSON"),
    ("chat/completions", {"model": "m", "messages": [USER, {"role": "assistant", "tool_calls": [
        {"id": "x", "function": {"name": "f", "arguments": "[]"}}]}, USER]}, 400, "expected an object"),
    ("chat/completions", {"model": "m", "messages": [USER, {"role": "assistant", "content": "b"}]}, 400,
     "the last message is the assistant's"),
    ("chat/completions", {"model": 1, "messages": [USER]}, 400, "expected a string"),
    ("chat/completions", {"model": "m", "messages": [USER], "n": 2}, 400, "n is 2"),
    ("chat/completions", {"model": "m", "messages": [USER], "n": "1"}, 400, "n is '1'"),
    ("chat/completions", {"model": "m", "messages": [USER], "max_tokens": 0}, 400, "expected 1 or more"),
    ("chat/completions", {"model": "m", "messages": [USER], "max_tokens": -1}, 400, "expected 1 or more"),
    ("chat/completions", {"model": "m", "messages": [USER], "max_tokens": True}, 400, "expected an integer"),
    ("chat/completions", {"model": "m", "messages": [USER], "max_completion_tokens": 1.5}, 400, "expected an integer"),
    ("chat/completions", {"model": "m", "messages": [USER], "stop": ""}, 400, "empty text"),
    ("chat/completions", {"model": "m", "messages": [USER], "stop": [1]}, 400, "expected a string"),
    ("chat/completions", {"model": "m", "messages": [USER], "stop": ["x"] * 17}, 400, "at most 16"),
    ("chat/completions", {"model": "m", "messages": [USER], "stream": "yes"}, 400, "expected true or false"),
    ("chat/completions", {"model": "m", "messages": [USER], "stream_options": 1}, 400, "expected an object"),
    ("chat/completions", {"model": "m", "messages": [USER], "tools": [{"type": "retrieval"}]}, 400, "'retrieval'"),
    ("chat/completions", {"model": "m", "messages": [USER], "tools": [{"type": "function"}]}, 400, "the function"),
    ("chat/completions", {"model": "m", "messages": [USER], "tools": [{"type": "function", "function": {"name": ""}}]},
     400, "empty name"),
    ("chat/completions", {"model": "m", "messages": [USER], "tools": [
        {"type": "function", "function": {"name": "f", "parameters": 1}}]}, 400, "the schema of tool 'f'"),
    ("chat/completions", {"model": "m", "messages": [USER], "functions": []}, 400, "expected `tools`"),
    ("chat/completions", {"model": "m", "messages": [{"role": "user", "content": "a" * 20_000}]}, 400,
     "the policy reads 9999"),
    ("messages", {"model": "m", "messages": [USER]}, 400, "no 'max_tokens'"),
    ("messages", {"model": "m", "max_tokens": 9}, 400, "no 'messages'"),
    ("messages", {"model": "m", "max_tokens": 9, "messages": []}, 400, "messages is empty"),
    ("messages", {"model": "m", "max_tokens": "9", "messages": [USER]}, 400, "expected an integer"),
    ("messages", {"model": "m", "max_tokens": 9, "messages": [{"role": "system", "content": "a"}]}, 400, "'system'"),
    ("messages", {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": None}]}, 400,
     "expected a string"),
    ("messages", {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400,
     "'image'"),
    ("messages", {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
     400, "'tool_use'"),
    ("messages", {"model": "m", "max_tokens": 9, "messages": [
        {"role": "user", "content": [{"type": "tool_result", "content": "a"}]}]}, 400, "tool_use_id"),
    ("messages", {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": []}]}, 400, "no messages"),
    ("messages", {"model": "m", "max_tokens": 9, "messages": [USER], "system": 5}, 400, "expected a list"),
    ("messages", {"model": "m", "max_tokens": 9, "messages": [USER], "tools": [{"type": "bash_20250124"}]}, 400,
     "the provider runs"),
    ("messages", {"model": "m", "max_tokens": 9, "messages": [USER], "tools": [{"input_schema": {}}]}, 400,
     "the name of a tool"),
    ("messages", {"model": "m", "max_tokens": 9, "messages": [USER], "tool_choice": "auto"}, 400, "expected an object"),
    ("messages/count_tokens", {"model": "m"}, 400, "no 'messages'"),
    ("responses", {"model": "m"}, 400, "no 'input'"),
    ("responses", {"model": "m", "input": []}, 400, "input is empty"),
    ("responses", {"model": "m", "input": [1]}, 400, "expected an object"),
    ("responses", {"model": "m", "input": [{"type": "web_search_call"}]}, 400, "'web_search_call'"),
    ("responses", {"model": "m", "input": [{"type": "function_call_output", "call_id": "x", "output": "a"}]}, 400,
     "no call before it"),
    ("responses", {"model": "m", "input": "a", "previous_response_id": "resp_other"}, 404, "no response 'other'"),
    ("responses", {"model": "m", "input": "a", "max_output_tokens": 0}, 400, "expected 1 or more"),
    ("responses", {"model": "m", "input": "a", "tools": [{"type": "web_search"}]}, 400, "'web_search'"),
    ("embeddings", {"model": "m", "input": "a"}, 404, "there is no POST /v1/embeddings"),
    ("../v1/secrets", {}, 404, "there is no POST"),
]  # fmt: skip


def test_malformed_requests_are_refused_in_the_dialects_form() -> None:
    async def test(gateway: Gateway, session: AgentSession) -> None:
        headers = {"Authorization": f"Bearer {session.id}"}
        async with aiohttp.ClientSession(headers=headers) as client:
            for path, body, status, message in MALFORMED:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                async with client.post(f"{gateway.url}/v1/{path}", data=data) as reply:
                    answer = await reply.json()
                    assert (reply.status, message in answer["error"]["message"]) == (status, True), (body, answer)
                    assert ("type" in answer) == path.startswith("messages"), answer
            body = {"model": "m", "messages": [USER], "temperature": 0.1, "seed": 1}
            async with client.post(f"{gateway.url}/sessions/{session.id}/v1/chat/completions", json=body) as reply:
                assert (reply.status, reply.headers["x-rlkit-ignored"]) == (200, "seed, temperature")
        assert len(session.forest.nodes) == 1
        assert not session.counts["requests_dropped"]

    assert len(MALFORMED) >= 60
    run(test)


def test_tokens_and_sizes_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_BYTES", 1000)

    async def test(gateway: Gateway, session: AgentSession) -> None:
        other = gateway.open(FakePolicy(), SessionLimits())
        ended = gateway.open(FakePolicy(), SessionLimits())
        await gateway.end(ended)
        body = {"model": "m", "messages": [USER]}
        path = f"{gateway.url}/sessions/{session.id}/v1/chat/completions"
        async with aiohttp.ClientSession() as client:

            async def status(url: str, token: str | None, data: object = body) -> int:
                headers = {} if token is None else {"Authorization": f"Bearer {token}"}
                async with client.post(url, json=data, headers=headers) as reply:
                    assert "error" in await reply.json() or reply.status == 200
                    return reply.status

            plain = f"{gateway.url}/v1/chat/completions"
            assert await status(plain, None) == 401
            assert await status(plain, "wrong") == 401
            assert await status(plain, ended.id) == 401
            assert await status(path, other.id) == 401  # another session's token
            assert await status(path, None) == await status(path, "EMPTY") == await status(plain, session.id) == 200
            assert await status(plain, session.id, {**body, "user": "x" * 2000}) == 413
        assert len(other.forest.nodes) == 0

    run(test)


def test_a_session_has_limits() -> None:
    async def test(gateway: Gateway, session: AgentSession) -> None:
        policy: Any = session.backend
        policy.hold = asyncio.Event()
        async with chat_client(gateway, session.id, max_retries=0) as client:

            def ask(text: str) -> Any:
                return client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])

            flood = [asyncio.ensure_future(ask(str(i))) for i in range(20)]
            done, waiting = await asyncio.wait(flood, timeout=0.5)
            assert len(waiting) == 3
            assert all(isinstance(task.exception(), openai.RateLimitError) for task in done)
            policy.hold.set()
            await asyncio.wait(waiting)
            await ask("x")
            with pytest.raises(openai.BadRequestError, match=r"used its 4 turns \(conversation.turns\)"):
                await ask("y")
        assert len(session.forest.nodes) == 4
        assert session.counts["requests_refused"] == 18

    run(test, limits=SessionLimits(turns=4, concurrent=3))


def test_a_disconnect_commits_nothing() -> None:
    async def test(gateway: Gateway, session: AgentSession) -> None:
        policy: Any = session.backend
        policy.hold = asyncio.Event()
        body = {"model": "m", "messages": [USER], "stream": True}
        headers = {"Authorization": f"Bearer {session.id}"}
        async with aiohttp.ClientSession(headers=headers) as client:
            for stream in (False, True):
                with pytest.raises(TimeoutError):
                    async with (
                        asyncio.timeout(0.2),
                        client.post(f"{gateway.url}/v1/chat/completions", json={**body, "stream": stream}) as reply,
                    ):
                        await reply.read()
        async with asyncio.timeout(5):
            while session.counts["requests_dropped"] < 2:
                await asyncio.sleep(0.01)
        policy.hold.set()
        await asyncio.sleep(0.05)
        assert not session.forest.nodes

    run(test)


def test_an_equal_request_is_joined_and_a_retry_repeated() -> None:
    async def test(gateway: Gateway, session: AgentSession) -> None:
        policy: Any = session.backend
        policy.hold = asyncio.Event()
        async with chat_client(gateway, session.id) as client:

            def ask(**options: Any) -> Any:
                return client.chat.completions.create(model="m", messages=[USER], **options)  # type: ignore[list-item]

            asking = [asyncio.ensure_future(ask()) for _ in range(3)]
            await asyncio.sleep(0.3)
            policy.hold.set()
            texts = {answer.choices[0].message.content for answer in await asyncio.gather(*asking)}
            assert texts == {"turn 1"}
            again = await ask(extra_headers={"x-stainless-retry-count": "1"})
            assert again.choices[0].message.content == "turn 1"
            fresh = await ask()
            assert fresh.choices[0].message.content == "turn 2"
        assert tree(session.forest) == [None, None]
        assert (session.counts["requests_joined"], session.counts["requests_repeated"]) == (2, 1)

    run(test)


def test_the_clients_retry_what_the_engine_did_not_answer() -> None:
    async def test(gateway: Gateway, session: AgentSession) -> None:
        errors: list[Exception | None] = [RolloutError("a server has died"), None]
        policy: Any = session.backend
        policy.fail = lambda: errors.pop(0)
        async with chat_client(gateway, session.id, max_retries=1) as client:
            answer = await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
            assert answer.choices[0].message.content
            assert session.error is None
            errors += [RolloutError("a server has died")] * 2
            with pytest.raises(openai.InternalServerError, match="a server has died"):
                await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
        assert session.error == "a server has died"

    run(test)


def test_the_end_of_a_session_ends_its_requests() -> None:
    async def test(gateway: Gateway, session: AgentSession) -> None:
        policy: Any = session.backend
        policy.hold = asyncio.Event()
        async with chat_client(gateway, session.id, max_retries=0) as client:
            asking = asyncio.ensure_future(client.chat.completions.create(model="m", messages=[USER]))  # type: ignore[list-item]
            await asyncio.sleep(0.2)
            await gateway.end(session)
            with pytest.raises(openai.APIStatusError, match="the session has ended"):
                await asking
        assert not session.forest.nodes

    run(test)


def test_64_sessions_on_two_servers_stay_apart() -> None:
    async def test(gateway: Gateway, session: AgentSession) -> None:
        async with serving() as (second, _):
            sessions = [(g, g.open(FakePolicy(), SessionLimits())) for g in (gateway, second) for _ in range(32)]

            async def converse(own: Gateway, conversation: AgentSession, client: aiohttp.ClientSession) -> None:
                messages: list[dict[str, str]] = []
                headers = {"x-api-key": conversation.id}
                for turn in range(3):
                    messages.append({"role": "user", "content": f"{conversation.id} {turn}"})
                    body = {"model": "m", "messages": messages}
                    async with client.post(f"{own.url}/v1/chat/completions", json=body, headers=headers) as reply:
                        answer = (await reply.json())["choices"][0]["message"]["content"]
                    messages.append({"role": "assistant", "content": answer})

            async with aiohttp.ClientSession() as client:
                await asyncio.gather(*(converse(own, conversation, client) for own, conversation in sessions))
            for _, conversation in sessions:
                assert tree(conversation.forest) == [None, 0, 1]
                assert len(conversation.forest.samples()) == 1

    run(test)

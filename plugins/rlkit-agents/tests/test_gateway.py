"""The gateway over HTTP: the providers' own clients, their limits, and agents that mean ill."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest
from rlkit_agents import server
from rlkit_agents.chat import ChatCompletions
from rlkit_agents.request import RequestError
from rlkit_agents.server import ChatGateway
from rlkit_agents.session import AgentSession

from rlkit.base.errors import RecipeError, RolloutError
from rlkit.interfaces.gateway import SessionLimits
from tests.agent_clients import chat_client, message_client, run, serving
from tests.events import until
from tests.fake_policy import FakePolicy, ask, tree, user

CALLS = (
    'Both. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    '<tool_call>{"name": "sub", "arguments": {"b": [2, "x"]}}</tool_call>'
)
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("add", "sub")]
MESSAGE_TOOLS: Any = [{"name": name, "input_schema": SCHEMA} for name in ("add", "sub")]
RESPONSE_TOOLS: Any = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("add", "sub")]


@pytest.mark.parametrize("stream", [False, True])
def test_the_chat_client_reads_texts_calls_and_results(stream: bool) -> None:
    async def test(gateway: ChatGateway, session: AgentSession) -> None:
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


@pytest.mark.parametrize(
    ("options", "counted"),
    [({}, []), ({"stream_options": {"include_usage": True}}, [(len("[]user:go\x03assistant:"), len("done!"))])],
)
def test_a_stream_of_chat_ends_with_the_number_of_tokens_if_asked(options: Any, counted: list[tuple[int, int]]) -> None:
    async def test(gateway: ChatGateway, session: AgentSession) -> None:
        async with chat_client(gateway, session.id) as client:
            messages: list[Any] = [{"role": "user", "content": "go"}]
            chunks: Any = await client.chat.completions.create(
                model="m", messages=messages, stop="!", stream=True, **options
            )
            usages = [chunk.usage async for chunk in chunks if chunk.usage is not None]
        assert [(usage.prompt_tokens, usage.completion_tokens) for usage in usages] == counted

    run(test, "done! and more")


def test_ids_of_answers_show_nothing_of_the_key() -> None:
    async def test(gateway: ChatGateway, session: AgentSession) -> None:
        async with chat_client(gateway, session.id) as client:
            answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])
        pieces = {session.id[start : start + 8] for start in range(len(session.id) - 7)}
        assert not [piece for piece in pieces if piece in answer.id]

    run(test, "done")


@pytest.mark.parametrize("stream", [False, True])
def test_the_messages_client_reads_texts_calls_and_results(stream: bool) -> None:
    async def test(gateway: ChatGateway, session: AgentSession) -> None:
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
    async def test(gateway: ChatGateway, session: AgentSession) -> None:
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


USER: Any = user("a")


def test_tokens_and_sizes_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_BYTES", 1000)

    async def test(gateway: ChatGateway, session: AgentSession) -> None:
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
    async def test(gateway: ChatGateway, session: AgentSession) -> None:
        policy: Any = session.backend
        policy.hold = asyncio.Event()
        async with chat_client(gateway, session.id, max_retries=0) as client:

            def ask(text: str) -> Any:
                return client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])

            flood = [asyncio.ensure_future(ask(str(i))) for i in range(20)]
            await until(lambda: len(policy.sampled) + session.counts["requests_refused"] == 20)
            policy.hold.set()
            answers = await asyncio.gather(*flood, return_exceptions=True)
            assert sum(isinstance(answer, openai.RateLimitError) for answer in answers) == 17
            await ask("x")
            with pytest.raises(openai.BadRequestError, match=r"used its 4 turns \(conversation.turns\)"):
                await ask("y")
        assert len(session.forest.nodes) == 4
        assert session.counts["requests_refused"] == 18

    run(test, limits=SessionLimits(turns=4, concurrent=3))


@pytest.mark.parametrize(("asked", "left", "expected"), [(5, 3, 3), (3, 5, 3), (None, 4, 4), (4, None, 4)])
def test_a_turn_has_the_fewest_tokens_allowed(asked: int | None, left: int | None, expected: int) -> None:
    async def test(gateway: ChatGateway, session: AgentSession) -> None:
        limits = {} if asked is None else {"max_tokens": asked}
        async with chat_client(gateway, session.id, max_retries=0) as client:
            await client.chat.completions.create(model="m", messages=[USER], **limits)
        assert len(session.forest.nodes[0].completion.tokens) == expected

    run(test, "a long text", limits=SessionLimits(tokens=left))


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_commits_nothing(stream: bool) -> None:
    async def test(gateway: ChatGateway, session: AgentSession) -> None:
        policy: Any = session.backend
        policy.hold = asyncio.Event()
        body = {"model": "m", "messages": [USER], "stream": stream}
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {session.id}"}) as client:
            asking = asyncio.ensure_future(client.post(f"{gateway.url}/v1/chat/completions", json=body))
            await until(lambda: bool(policy.sampled))
            if stream:  # its headers come before its turn
                (await asking).close()
            asking.cancel()
            await until(lambda: session.counts["requests_dropped"] == 1)
        policy.hold.set()
        await ask(session, user("b"))  # whatever is still sampled ends before it
        assert tree(session.forest) == [None]

    run(test)


def test_a_dropped_request_that_ends_late_leaves_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine takes a while to abort; meanwhile the agent asks the same again, and then the session ends."""

    async def test(gateway: ChatGateway, session: AgentSession) -> None:
        policy: Any = session.backend
        policy.hold, aborted = asyncio.Event(), asyncio.Event()
        sample = policy.sample

        async def lingering(*args: Any) -> Any:
            try:
                return await sample(*args)
            except asyncio.CancelledError:
                await aborted.wait()
                raise

        policy.sample = lingering
        first = asyncio.ensure_future(ask(session, user("a")))
        await until(lambda: bool(policy.sampled))
        first.cancel()
        await asyncio.wait((first,))
        second = asyncio.ensure_future(ask(session, user("a")))
        await until(lambda: len(policy.sampled) == 2)
        aborted.set()
        await asyncio.sleep(0.01)
        third = asyncio.ensure_future(ask(session, user("a")))
        await until(lambda: session.counts["requests_joined"] == 1)
        await gateway.end(session)
        policy.hold.set()
        for request in (second, third):
            with pytest.raises(RequestError, match="the session has ended"):
                await request
        assert not session.forest.nodes

    run(test)


def test_an_unexpected_error_costs_the_rollout_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the parser while a turn is committed, and of the gateway itself while a body is read."""

    def broken(*_: object) -> Any:
        raise ZeroDivisionError("of the parser")

    async def test(gateway: ChatGateway, session: AgentSession) -> None:
        other, policy = gateway.open(FakePolicy(), SessionLimits()), session.backend
        async with chat_client(gateway, session.id, max_retries=0) as client:
            monkeypatch.setattr(policy, "read", broken)
            with pytest.raises(
                openai.InternalServerError, match="the gateway failed: ZeroDivisionError: of the parser"
            ):
                await client.chat.completions.create(model="m", messages=[USER])
            assert session.error == "the gateway failed: ZeroDivisionError: of the parser"
            monkeypatch.setattr(ChatCompletions, "read", broken)
            with pytest.raises(openai.InternalServerError, match="the gateway failed: ZeroDivisionError"):
                await client.chat.completions.create(model="m", messages=[USER])
        async with message_client(gateway, other.id) as messages:
            await messages.messages.create(model="m", max_tokens=9, messages=[USER])
        assert (tree(session.forest), tree(other.forest), other.error) == ([], [None], None)

    run(test)


def test_messages_that_the_template_refuses_are_refused() -> None:
    def refuse(messages: Any, *_: object) -> list[int]:
        raise RecipeError("no system message there")

    async def test(gateway: ChatGateway, session: AgentSession) -> None:
        first = await ask(session, user("a"))
        session.backend.render = refuse  # type: ignore[method-assign]
        async with chat_client(gateway, session.id) as client:
            messages: Any = [USER, first, {"role": "system", "content": "s"}]
            with pytest.raises(openai.BadRequestError, match="no system message there"):
                await client.chat.completions.create(model="m", messages=messages)
        assert session.counts["turns_rerendered"] == 0

    run(test)


def test_a_dead_listener_is_replaced_at_its_address() -> None:
    async def test(gateway: ChatGateway, session: AgentSession) -> None:
        url, listener = gateway.url, gateway._listener
        assert listener is not None
        async with chat_client(gateway, session.id) as client:
            first = await client.chat.completions.create(model="m", messages=[USER])
            await client._client.aclose()
        listener.close()
        await listener.wait_closed()
        async with chat_client(gateway, session.id, max_retries=0) as client:
            messages = [USER, first.choices[0].message, USER]
            with pytest.raises(openai.APIConnectionError):
                await client.chat.completions.create(model="m", messages=messages)
            await gateway.start()  # as the next rollout does
            await client.chat.completions.create(model="m", messages=messages)
        assert (gateway.url, tree(session.forest)) == (url, [None, 0])

    run(test)


def test_an_equal_request_is_joined_and_a_retry_repeated() -> None:
    async def test(gateway: ChatGateway, session: AgentSession) -> None:
        policy: Any = session.backend
        policy.hold = asyncio.Event()
        async with chat_client(gateway, session.id) as client:

            def ask(**options: Any) -> Any:
                return client.chat.completions.create(model="m", messages=[USER], **options)

            asking = [asyncio.ensure_future(ask()) for _ in range(3)]
            await until(lambda: session.counts["requests_joined"] == 2)
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
    async def test(gateway: ChatGateway, session: AgentSession) -> None:
        errors: list[Exception | None] = [RolloutError("a server has died"), None]
        policy: Any = session.backend
        policy.fail = lambda: errors.pop(0)
        async with chat_client(gateway, session.id, max_retries=1) as client:
            answer = await client.chat.completions.create(model="m", messages=[USER])
            assert answer.choices[0].message.content
            assert session.error is None
            errors += [RolloutError("a server has died")] * 2
            with pytest.raises(openai.InternalServerError, match="a server has died"):
                await client.chat.completions.create(model="m", messages=[USER])
        assert session.error == "a server has died"

    run(test)


def test_the_end_of_a_session_ends_its_requests() -> None:
    async def test(gateway: ChatGateway, session: AgentSession) -> None:
        policy: Any = session.backend
        policy.hold = asyncio.Event()
        async with chat_client(gateway, session.id, max_retries=0) as client:
            asking = asyncio.ensure_future(client.chat.completions.create(model="m", messages=[USER]))  # type: ignore[list-item]
            await until(lambda: bool(policy.sampled))
            await gateway.end(session)
            with pytest.raises(openai.APIStatusError, match="the session has ended"):
                await asking
        assert not session.forest.nodes

    run(test)


def test_64_sessions_on_two_servers_stay_apart() -> None:
    async def test(gateway: ChatGateway, session: AgentSession) -> None:
        async with serving() as (second, _):
            sessions = [(g, g.open(FakePolicy(), SessionLimits())) for g in (gateway, second) for _ in range(32)]

            async def converse(own: ChatGateway, conversation: AgentSession, client: aiohttp.ClientSession) -> None:
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

"""Requests that the gateway refuses, in each API's form of errors; the conversation goes on after them."""

from __future__ import annotations

import functools
import gzip
import json
from typing import Any

import aiohttp
import pytest
from rlkit_agents.chat import ChatCompletions
from rlkit_agents.server import ChatGateway
from rlkit_agents.session import AgentSession

from tests.agent_clients import run
from tests.fake_policy import ask, tree, user

USER = user("a")
DEEP: Any = functools.reduce(lambda inner, _: [inner], range(65), 1)
MALFORMED: list[tuple[str, Any, int, str]] = [
    ("chat/completions", b"", 400, "no JSON"),
    ("chat/completions", b"[" * 100_000, 400, "no JSON"),
    ("chat/completions", b"\xff\xfe{}", 400, "no JSON"),
    ("chat/completions", b"[]", 400, "no JSON object"),
    ("chat/completions", {}, 400, "no 'messages'"),
    ("chat/completions", {"messages": [USER]}, 400, "no 'model'"),
    ("chat/completions", {"model": "m", "messages": []}, 400, "messages is empty"),
    ("chat/completions", {"model": "m", "messages": {}}, 400, "expected a list"),
    ("chat/completions", {"model": "m", "messages": ["a"]}, 400, "expected an object"),
    ("chat/completions", {"model": "m", "messages": [{}]}, 400, "the role None"),
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
    ("chat/completions", {"model": "m", "messages": [USER], "max_tokens": 0}, 400, "expected 1 or more"),
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
    ("messages", {"model": "m", "max_tokens": 9, "messages": [USER], "thread": "create"}, 400, "thread is 'create'"),
    ("messages", {"model": "m", "max_tokens": 9, "messages": [USER], "thread": {"type": "end"}}, 400, "type 'end'"),
    ("messages", {"model": "m", "max_tokens": 9, "messages": [USER], "thread": {"type": "continue"}}, 400,
     "previous_message_id of thread is None"),
    ("messages", {"model": "m", "max_tokens": 9, "messages": [USER], "thread": {
        "type": "continue", "previous_message_id": "msg_other"}}, 404, "no response 'other'"),
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
    ("responses", {"model": "m", "input": "a", "previous_response_id": "resp_other"}, 404, "no response 'other'"),
    ("responses", {"model": "m", "input": "a", "max_output_tokens": 0}, 400, "expected 1 or more"),
    ("responses", {"model": "m", "input": "a", "tools": [{"type": "web_search"}]}, 400, "'web_search'"),
    ("chat/completions", {"model": "m", "messages": [USER], "tools": 0}, 400, "tools is 0"),
    ("chat/completions", {"model": "m", "messages": [USER], "tools": [
        {"type": "function", "function": {"name": "f", "description": 5}}]}, 400, "the description of tool 'f'"),
    ("chat/completions", {"model": "m", "messages": [USER], "tool_choice": 5}, 400, "tool_choice is 5"),
    ("chat/completions", {"model": "m", "messages": [USER, {"role": "assistant", "function_call": {}}, USER]}, 400,
     "expected `tool_calls`"),
    ("chat/completions", {"model": "m", "messages": [USER, {"role": "assistant", "tool_calls": {}}, USER]}, 400,
     "tool_calls is {}"),
    ("chat/completions", {"model": "m", "messages": [{"role": ["user"], "content": "a"}]}, 400, "the role ['user']"),
    ("chat/completions", {"model": "m", "messages": [USER], "metadata": DEEP}, 400, "nested too deeply"),
    ("chat/completions", {"model": "m", "messages": [USER, {"role": "assistant", "tool_calls": [
        {"id": "x", "function": {"name": "f", "arguments": json.dumps(DEEP)}}]}, USER]}, 400, "nested too deeply"),
    ("chat/completions", b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": NaN}', 400,
     "max_tokens is nan"),
    ("chat/completions", b'{"model": "m", "messages": [{"role": "\\ud800", "content": "a"}]}', 400, "the role"),
    ("messages", b"", 400, "no JSON"),
    ("messages", {"max_tokens": 9, "messages": [USER]}, 400, "no 'model'"),
    ("messages", {"model": "m", "max_tokens": 9, "messages": [5]}, 400, "expected an object"),
    ("messages", {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": [5]}]}, 400,
     "expected an object"),
    ("messages", {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "thinking"}]}]},
     400, "no messages"),
    ("messages", {"model": "m", "max_tokens": 9, "messages": [USER, {"role": "assistant", "content": [
        {"type": "tool_use", "id": "x", "name": "f", "input": [1]}]}, USER]}, 400, "expected an object"),
    ("messages", {"model": "m", "max_tokens": 9, "messages": [USER, {"role": "assistant", "content": [
        {"type": "tool_use", "name": "f", "input": {}}]}, USER]}, 400, "the id of a tool_use"),
    ("messages", {"model": "m", "max_tokens": 9, "messages": [USER], "stop_sequences": [""]}, 400, "empty text"),
    ("responses", {"input": "a"}, 400, "no 'model'"),
    ("responses", {"model": "m", "input": {}}, 400, "input is {}"),
    ("responses", {"model": "m", "input": "a", "instructions": 5}, 400, "instructions is 5"),
    ("responses", {"model": "m", "input": "a", "previous_response_id": 5}, 400, "previous_response_id is 5"),
    ("responses", {"model": "m", "input": "a", "stream": 1}, 400, "expected true or false"),
    ("responses", {"model": "m", "input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400,
     "'input_image'"),
    ("responses", {"model": "m", "input": [{"role": "robot", "content": "a"}]}, 400, "the role 'robot'"),
    ("responses", {"model": "m", "input": [{"type": "function_call", "name": "f", "call_id": "x", "arguments": "{"}]},
     400, "are no JSON"),
    ("embeddings", {"model": "m", "input": "a"}, 404, "there is no POST /v1/embeddings"),
    ("../v1/secrets", {}, 404, "there is no POST"),
]  # fmt: skip


@pytest.mark.parametrize("limits", [{"max_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": None}])
def test_a_limit_that_is_null_is_none(limits: dict[str, Any]) -> None:
    request = ChatCompletions().read({"model": "m", "messages": [USER], **limits}, lambda _: [])  # type: ignore[arg-type]
    assert request.max_tokens == 3


@pytest.mark.parametrize(("path", "body", "status", "message"), MALFORMED)
def test_a_malformed_request_is_refused_in_the_apis_form(path: str, body: Any, status: int, message: str) -> None:
    async def test(gateway: ChatGateway, session: AgentSession) -> None:
        first = await ask(session, USER)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with (
            aiohttp.ClientSession(headers={"x-api-key": session.id}) as client,
            client.post(f"{gateway.url}/v1/{path}", data=data) as reply,
        ):
            answer = await reply.json()
        assert (reply.status, message in answer["error"]["message"]) == (status, True), answer
        assert answer["error"]["type"] == ("invalid_request_error" if status == 400 else "not_found_error")
        assert answer.get("type") == ("error" if path.partition("/")[0] == "messages" else None)
        await ask(session, USER, first, USER)
        assert tree(session.forest) == [None, 0]
        assert (session.error, session.counts["requests_dropped"]) == (None, 0)

    run(test)


def test_a_body_that_no_codec_reads_is_refused() -> None:
    async def test(gateway: ChatGateway, session: AgentSession) -> None:
        body = json.dumps({"model": "m", "messages": [USER], "temperature": 0.1, "tool_choice": "required"}).encode()
        headers = {"x-api-key": session.id, "Content-Encoding": "gzip"}
        async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(force_close=True)) as client:
            url = f"{gateway.url}/v1/chat/completions"
            async with client.post(url, data=body) as reply:
                assert (reply.status, "cannot be read" in await reply.text()) == (400, True)
            async with client.post(url, data=gzip.compress(bytes(2**25))) as reply:
                assert reply.status == 413
            async with client.post(url, data=gzip.compress(body)) as reply:
                assert (reply.status, reply.headers["x-rlkit-ignored"]) == (200, "temperature, tool_choice")
        assert tree(session.forest) == [None]

    run(test)

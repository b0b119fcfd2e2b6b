"""Pictures in requests of each dialect: read from data alone, compared by their files, at the index of their tokens."""

from __future__ import annotations

import asyncio
import base64
import io
import struct
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from rlkit_agents.chat import ChatCompletions
from rlkit_agents.dialect import Dialect
from rlkit_agents.messages import Messages
from rlkit_agents.request import ChatRequest, RequestError
from rlkit_agents.responses import Responses
from rlkit_agents.session import AgentSession

from rlkit.base.errors import RecipeError
from rlkit.interfaces.picture import Picture
from rlkit.types import JsonObject, Message
from tests.fake_policy import ask, session_of, tree, user


def png(colour: str = "red") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), colour).save(buffer, "PNG")
    return buffer.getvalue()


def bomb() -> bytes:
    """Return a PNG of 100,000 x 100,000 pixels in few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{text_of(data)}"


def chat_part(address: str) -> JsonObject:
    return {"type": "image_url", "image_url": {"url": address, "detail": "low"}}


def responses_part(address: str) -> JsonObject:
    return {"type": "input_image", "image_url": address}


def messages_part(address: str) -> JsonObject:
    if not address.startswith("data:image/png;base64,"):
        return {"type": "image", "source": {"type": "url", "url": address}}
    source = {"type": "base64", "media_type": "image/png", "data": address.partition(",")[2]}
    return {"type": "image", "source": source}


def chat_body(*parts: JsonObject) -> JsonObject:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    tool = {"role": "tool", "tool_call_id": "c", "content": list(parts)}
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}, called, tool]}


def responses_body(*parts: JsonObject) -> JsonObject:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": list(parts)}
    return {"model": "m", "input": [{"role": "user", "content": list(parts)}, call, output]}


def messages_body(*parts: JsonObject) -> JsonObject:
    call = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    output = {"type": "tool_result", "tool_use_id": "c", "content": list(parts)}
    asked = {"role": "user", "content": list(parts)}
    turns = [asked, {"role": "assistant", "content": [call]}, {"role": "user", "content": [output]}]
    return {"model": "m", "max_tokens": 9, "messages": turns}


DIALECTS: list[tuple[Dialect, Any, Any]] = [
    (ChatCompletions(), chat_part, chat_body),
    (Responses(), responses_part, responses_body),
    (Messages(), messages_part, messages_body),
]
NAMES = ["chat", "responses", "messages"]


def read(dialect: Dialect, body: JsonObject) -> ChatRequest:
    return dialect.read(body, lambda _: [])


@pytest.mark.parametrize(("dialect", "part", "body"), DIALECTS, ids=NAMES)
def test_pictures_are_read_in_order(dialect: Dialect, part: Any, body: Any) -> None:
    """In a user's message and in a tool's result; texts in a row are one."""
    texts = [{"type": "text", "text": text} for text in ("What ", "is ", "this?")]
    request = read(dialect, body(*texts[:2], part(uri(png())), texts[2]))
    expected = [
        {"type": "text", "text": "What is "},
        {"type": "image", "image": Picture(png())},
        {"type": "text", "text": "this?"},
    ]
    asked, _, result = request.messages
    assert asked == {"role": "user", "content": expected}
    assert (result["role"], result["content"]) == ("tool", expected)


REFUSED = {
    "an address": "https://example.com/a.png",
    "a path": "/etc/passwd",
    "a file": "file:///etc/passwd",
    "no base64": "data:image/png;base64,%%%",
    "no picture": uri(b"<svg onload=alert(1)/>"),
    "a truncated picture": uri(png()[:20]),
    "a bomb": uri(bomb()),
    "nothing": uri(b""),
    "a text as data": "data:image/png,red",
}


@pytest.mark.parametrize(("dialect", "part", "body"), DIALECTS, ids=NAMES)
@pytest.mark.parametrize("address", REFUSED)
def test_what_is_no_picture_is_refused(dialect: Dialect, part: Any, body: Any, address: str) -> None:
    with pytest.raises(RequestError, match="has a picture that is not read") as refused:
        read(dialect, body(part(REFUSED[address])))
    assert refused.value.status == 400


@pytest.mark.parametrize("content", [{}, {"image_url": None}, {"image_url": {"url": 7}}, {"file_id": "f"}])
def test_a_part_without_data_is_refused(content: JsonObject) -> None:
    with pytest.raises(RequestError, match="the data of a part of type 'image_url' in .* expected a string"):
        read(ChatCompletions(), chat_body({"type": "image_url", **content}))


def test_a_policys_turn_has_no_pictures() -> None:
    body = {"model": "m", "messages": [{"role": "assistant", "content": [chat_part(uri(png()))]}]}
    with pytest.raises(RequestError, match="a part of type 'image_url'"):
        read(ChatCompletions(), body)


def seen(colour: str, text: str = "What?") -> Message:
    picture = {"type": "image", "image": Picture(png(colour))}
    return {"role": "user", "content": [picture, {"type": "text", "text": text}]}


def test_histories_are_compared_by_the_files_of_pictures() -> None:
    """The same picture goes on; another one, or none, begins another conversation."""

    async def history(session: AgentSession) -> None:
        first = await ask(session, seen("red"))
        await ask(session, seen("red", " What? "), first, user("b"))
        await ask(session, seen("blue"), first, user("b"))
        await ask(session, user("What?"), first, user("b"))

    session = session_of()
    asyncio.run(history(session))
    assert tree(session.forest) == [None, 0, None, None]


def test_a_policy_without_pictures_refuses_them() -> None:
    session = session_of()

    def render(*_: object) -> None:
        raise RecipeError("the messages hold pictures, but the policy reads texts alone; send texts")

    session.backend.render = render  # type: ignore[assignment,method-assign]
    with pytest.raises(RequestError, match="reads texts alone") as refused:
        asyncio.run(ask(session, seen("red")))
    assert refused.value.status == 400


COLOURS = ("red", "blue", "green")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from([None, *COLOURS])), max_size=10))
def test_prompts_extend_ids_and_pictures(steps: list[tuple[int, int, str | None]]) -> None:
    """Whatever is continued or rewritten: ids and pictures of the turn that goes on are a prefix, at the same index."""

    async def play() -> AgentSession:
        session = session_of()
        conversations: list[list[Message]] = [[]]
        for which, cut, colour in steps:
            messages = list(conversations[which % len(conversations)])
            messages = messages[: 2 * (cut % (len(messages) // 2 + 1))]
            messages.append(user("text") if colour is None else seen(colour))
            conversations.append([*messages, await ask(session, *messages)])
        return session

    session = asyncio.run(play())
    forest = session.forest
    for node, media in zip(forest.nodes, session.backend.media, strict=True):  # type: ignore[attr-defined]
        sampled = [] if media is None else media.segments
        path = forest.media(node)
        assert [(s.end, s.pictures) for s in sampled] == [(s.end, s.pictures) for s in path]
        asked = [m["content"] for turn in forest.path(node) for m in turn.messages if isinstance(m["content"], list)]
        assert [picture for s in path for picture in s.pictures] == [content[0]["image"] for content in asked]
        parent = None if node.parent is None else forest.nodes[node.parent]
        earlier = forest.media(parent)
        assert [(s.end, s.pictures) for s in path[: len(earlier)]] == [(s.end, s.pictures) for s in earlier]
    for sample in forest.samples():
        assert all(segment.end <= len(sample.tokens) for segment in sample.media)

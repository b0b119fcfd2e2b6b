"""One session that sends too much, too slowly or without end: the others are answered as if it were not there."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest
from rlkit_agents import admission, connections, server
from rlkit_agents.request import RequestError
from rlkit_agents.server import ChatGateway
from rlkit_agents.session import AgentSession

from rlkit.interfaces.gateway import SessionLimits
from rlkit.types import Completion, JsonObject, Message, Rendered
from tests.agent_clients import chat_client, run
from tests.events import until
from tests.fake_policy import FakePolicy, tree, user

CHAT, COUNT = "/v1/chat/completions", "/v1/messages/count_tokens"
BODY = json.dumps({"model": "m", "messages": [user("a")]}).encode()


class HeldPolicy(FakePolicy):
    """Holds the rendering of messages that say "held"."""

    def __init__(self) -> None:
        super().__init__(context=2**30)
        self.rendering: list[str] = []
        self.opened = threading.Event()

    def render(self, messages: Sequence[Message], tools: Sequence[JsonObject], after: Completion | None) -> Rendered:
        text = messages[-1]["content"][:6]
        self.rendering.append(text)
        if text.startswith("held"):
            assert self.opened.wait(60)
        return super().render(messages, tools, after)


class Connection:
    """A connection on which a test writes what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, gateway: ChatGateway) -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", gateway.port))

    def send(self, key: str, path: str = CHAT, body: bytes = BODY, headers: str = "") -> None:
        """Write a request; without other headers it states the body's length."""
        headers = headers or f"Content-Length: {len(body)}\r\n"
        head = f"POST {path} HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer {key}\r\n{headers}\r\n"
        self.writer.write(head.encode() + body)

    async def status(self) -> int:
        """Return the status of the next answer, which is read to its end."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        length = next(line for line in head.splitlines() if line.startswith("Content-Length"))
        await self.reader.readexactly(int(length.split(":")[1]))
        return int(head.split()[1])

    async def closed(self) -> None:
        """Wait until the gateway has closed the connection."""
        try:
            while await self.reader.read(2**16):
                pass
        except ConnectionError:
            pass


def other(gateway: ChatGateway, **limits: int) -> AgentSession:
    return gateway.open(FakePolicy(), SessionLimits(**limits))


async def answered(gateway: ChatGateway, session: AgentSession) -> None:
    """Ask in a session by OpenAI's client, which is not told to try again."""
    async with chat_client(gateway, session.id, max_retries=0) as client:
        await client.chat.completions.create(model="m", messages=[user("a")])  # type: ignore[list-item]


def open_connections(gateway: ChatGateway) -> int:
    assert gateway._runner is not None
    assert gateway._runner.server is not None
    return len(gateway._runner.server.connections)


def test_half_sent_posts_take_places_of_their_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STRANGERS", 40)

    async def test(gateway: ChatGateway, session: AgentSession) -> None:
        honest = other(gateway, concurrent=16)
        flood = []
        for _ in range(200):
            flood.append(await Connection.open(gateway))
            flood[-1].send(session.id, headers=f"Content-Length: {len(BODY) + 1}\r\n")
            await until(lambda: session.admission.requests + session.counts["requests_refused"] == len(flood))
        assert (session.admission.requests, session.counts["requests_refused"]) == (16, 184)
        await until(lambda: open_connections(gateway) == 16 + 40)  # of those refused the oldest are closed
        honest.backend.hold = asyncio.Event()  # type: ignore[attr-defined]
        asking = [asyncio.ensure_future(answered(gateway, honest)) for _ in range(16)]
        await until(lambda: honest.counts["requests_joined"] == 15)  # as many as it may have
        honest.backend.hold.set()  # type: ignore[attr-defined]
        await asyncio.gather(*asking)
        assert honest.counts["requests_refused"] == 0
        for connection in flood:
            connection.writer.close()
        await until(lambda: open_connections(gateway) == 0)
        await answered(gateway, session)

    run(test)


@pytest.mark.parametrize("path", [CHAT, COUNT])
def test_long_messages_are_read_beside_the_loop(path: str) -> None:
    async def test(gateway: ChatGateway, session: AgentSession) -> None:
        policy = HeldPolicy()
        hostile, honest = gateway.open(policy, SessionLimits(concurrent=2)), other(gateway)
        body = json.dumps({"model": "m", "messages": [user("held" + "x" * 2**20)]}).encode()
        flood = [await Connection.open(gateway) for _ in range(3)]
        for connection in flood:
            connection.send(hostile.id, path, body)
        await until(lambda: policy.rendering and hostile.counts["requests_refused"] == 1)
        await answered(gateway, honest)
        assert policy.rendering == ["heldxx"]  # one at a time, however many threads are free
        policy.opened.set()
        statuses = await asyncio.gather(*(connection.status() for connection in flood))
        assert sorted(statuses) == [200, 200, 429]
        assert (len(policy.rendering), len(hostile.forest.nodes)) == (2, 2 if path == CHAT else 0)

    run(test)


def test_a_dropped_request_keeps_its_thread() -> None:
    """Otherwise an agent that asks and leaves, again and again, would take all threads."""

    async def test(gateway: ChatGateway, session: AgentSession) -> None:
        policy = HeldPolicy()
        hostile = gateway.open(policy, SessionLimits(concurrent=2))
        body = json.dumps({"model": "m", "messages": [user("held")]}).encode()
        for places in (1, 2, 2):
            connection = await Connection.open(gateway)
            connection.send(hostile.id, COUNT, body)
            await until(lambda: policy.rendering and hostile.admission.requests == places)  # noqa: B023
            connection.writer.close()
            await until(lambda: (open_connections(gateway), hostile.admission.requests) == (1, 1))
        policy.opened.set()
        await until(lambda: open_connections(gateway) == 0)
        assert (policy.rendering, hostile.admission.requests) == (["held"], 0)

    run(test)


def test_bytes_are_charged_while_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "OPEN_BYTES", 1500)

    async def test(gateway: ChatGateway, session: AgentSession) -> None:
        first, second = [await Connection.open(gateway) for _ in range(2)]
        body = json.dumps({"model": "m", "messages": [user("x" * 900)]}).encode()
        first.send(session.id, body=body[:-1], headers=f"Content-Length: {len(body)}\r\n")
        await until(lambda: session.admission.bytes == len(body) - 1)
        second.send(session.id, body=body)
        assert await second.status() == 429
        await answered(gateway, other(gateway))
        first.writer.write(body[-1:])
        assert await first.status() == 200
        first.send(session.id, body=body)
        assert await first.status() == 200
        assert session.admission.bytes == 0

    run(test)


def test_a_body_ends_at_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_BYTES", 4000)
    monkeypatch.setattr(server, "MOST_OBJECTS", 50)

    async def test(gateway: ChatGateway, session: AgentSession) -> None:
        chunked, declared, late, early, objects = [await Connection.open(gateway) for _ in range(5)]
        chunked.send(session.id, body=b"3e8\r\n" + b"x" * 1000 + b"\r\n", headers="Transfer-Encoding: chunked\r\n")
        await until(lambda: session.admission.bytes == 1000)
        for _ in range(4):
            chunked.writer.write(b"3e8\r\n" + b"x" * 1000 + b"\r\n")  # and so on, without end
        assert await chunked.status() == 413
        declared.send(session.id, body=b"", headers="Content-Length: 4001\r\n")
        assert await declared.status() == 413
        early.send(session.id, headers=f"Content-Length: {len(BODY) + 1}\r\n")
        await until(lambda: session.admission.bytes == len(BODY))
        early.writer.close()
        await until(lambda: session.admission.bytes == 0)
        objects.send(session.id, body=json.dumps({"model": "m", "messages": [[]] * 50}).encode())
        assert await objects.status() == 413
        monkeypatch.setattr(server, "BODY_SECONDS", 0.01)
        late.send(session.id, headers=f"Content-Length: {len(BODY) + 1}\r\n")
        assert await late.status() == 408
        assert (session.admission.requests, session.error, tree(session.forest)) == (0, None, [])

    run(test)


def test_strangers_do_not_close_the_connections_of_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STRANGERS", 4)

    async def test(gateway: ChatGateway, session: AgentSession) -> None:
        known = await Connection.open(gateway)
        known.send(session.id)
        assert await known.status() == 200
        unknown = await Connection.open(gateway)
        unknown.send("unknown")
        assert await unknown.status() == 401
        await unknown.closed()
        strangers = [await Connection.open(gateway) for _ in range(10)]
        for stranger in strangers[::2]:
            stranger.writer.write(b"POST / HTTP/1.1\r\nHost: ")
        await asyncio.gather(*(stranger.closed() for stranger in strangers[:6]))
        await until(lambda: open_connections(gateway) == 1 + 4)
        known.send(session.id)
        assert await known.status() == 200

    run(test)


def test_a_session_keeps_as_many_idle_connections_as_requests() -> None:
    async def test(gateway: ChatGateway, session: AgentSession) -> None:
        idle = []
        for _ in range(5):  # as agents that make a client for each request, and forget it
            idle.append(await Connection.open(gateway))
            idle[-1].send(session.id)
            assert await idle[-1].status() == 200
        await asyncio.gather(*(connection.closed() for connection in idle[:3]))
        shared = idle[-1]
        shared.send(other(gateway).id)
        assert await shared.status() == 200
        await gateway.end(session)
        for connection in idle[3:]:  # a client that agents share goes on
            connection.send(other(gateway).id)
            assert await connection.status() == 200
            connection.send(session.id)
            assert await connection.status() == 401

    run(test, limits=SessionLimits(concurrent=2))


def test_the_end_of_a_session_closes_what_it_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that is half sent, and an answer that nobody reads."""
    monkeypatch.setattr(connections, "CLOSE_SECONDS", 0.01)

    async def test(gateway: ChatGateway, session: AgentSession) -> None:
        half, slow = [await Connection.open(gateway) for _ in range(2)]
        half.send(session.id, headers=f"Content-Length: {len(BODY) + 1}\r\n")
        slow.send(session.id, body=json.dumps({"model": "m", "messages": [user("a")], "stream": True}).encode())
        await until(lambda: session.forest.nodes)
        await answered(gateway, other(gateway))
        assert session.admission.requests == 2
        await gateway.end(session)
        await until(lambda: open_connections(gateway) == 0)
        assert session.admission.requests == 0

    run(test, "x" * 2**22)


def test_pipelined_requests_are_answered_one_by_one() -> None:
    async def test(gateway: ChatGateway, session: AgentSession) -> None:
        connection = await Connection.open(gateway)
        for _ in range(100):
            connection.send(session.id, COUNT)
        assert [await connection.status() for _ in range(100)] == [200] * 100
        assert session.counts["requests_refused"] == 0

    run(test, limits=SessionLimits(concurrent=1))


def test_a_flood_of_headers_is_refused() -> None:
    async def test(gateway: ChatGateway, session: AgentSession) -> None:
        connection = await Connection.open(gateway)
        connection.send(session.id, headers="".join(f"X-{i}: {'x' * 8000}\r\n" for i in range(1000)))
        assert await connection.status() == 400
        await connection.closed()
        await answered(gateway, session)

    run(test)


def test_an_agent_in_this_process_has_the_same_places() -> None:
    async def test(gateway: ChatGateway, session: AgentSession) -> None:
        policy: Any = session.backend
        policy.hold = asyncio.Event()
        asking = [asyncio.ensure_future(session.chat([user(str(i))], (), None)) for i in range(2)]
        await until(lambda: len(policy.sampled) == 2)
        with pytest.raises(RequestError, match="the session has 2 requests in flight, expected at most 2; wait"):
            await session.chat([user("2")], (), None)
        policy.hold.set()
        await asyncio.gather(*asking)
        assert session.counts["requests_refused"] == 1

    run(test, limits=SessionLimits(concurrent=2))


def test_what_a_body_calls_its_options_is_no_header() -> None:
    async def test(gateway: ChatGateway, session: AgentSession) -> None:
        body = {"model": "m", "messages": [user("a")], "a\r\nSet-Cookie: b": 1, "é": 2, "\x00": 3}
        async with (
            aiohttp.ClientSession(headers={"x-api-key": session.id}) as client,
            client.post(f"{gateway.url}{CHAT}", json=body) as reply,
        ):
            ignored = reply.headers["x-rlkit-ignored"]
        assert (reply.status, ignored) == (200, r"\x00, a\r\nSet-Cookie: b, \xe9")

    run(test)

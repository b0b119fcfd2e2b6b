"""Connections to a process of a pool, with the run's key and without it: over real sockets."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rlkit_placement import handshake, process
from rlkit_placement.handshake import ClientListener, KeyMismatchError, connect_client
from rlkit_placement.wire import receive, send
from rlkit_servers.process import free_port

from rlkit.interfaces.placement import PoolReply
from rlkit.types import JsonObject

KEY = bytes(range(32))


class Opened:
    """A listener for two clients, which accepts them in a thread."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.accepted: list[tuple[int, Connection]] = []
        self.has_accepted = threading.Event()
        self.listener = ClientListener(address, KEY, 2)
        self.thread = threading.Thread(target=self.listener.accept_all, args=(self.accept,), daemon=True)

    def accept(self, header: JsonObject, connection: Connection) -> None:
        self.accepted.append((header["rank"], connection))
        self.has_accepted.set()

    def open(self) -> None:
        self.thread.start()
        while True:
            with suppress(ConnectionRefusedError):  # until it listens
                return handshake.connected(self.address).close()

    def join(self, rank: int, key: bytes = KEY) -> Connection:
        """Connect, and wait until that is accepted, so that clients are accepted in order."""
        self.has_accepted.clear()
        connection = connect_client(self.address, key, {"kind": "together", "rank": rank}, 60.0)
        assert self.has_accepted.wait(60)
        return connection

    def peer(self) -> socket.socket:
        peer = handshake.connected(self.address)
        assert len(peer.recv(64)) == handshake.NONCE_BYTES
        return peer


@pytest.fixture(params=["tcp", "unix"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opened]:
    address = f"127.0.0.1:{free_port()}" if request.param == "tcp" else str(tmp_path / "s")
    opened = Opened(address)
    opened.open()
    yield opened
    if opened.thread.is_alive():
        for rank in (7, 8):
            opened.join(rank).close()
    opened.thread.join(60)
    assert not opened.thread.is_alive()


def require_clients(opened: Opened) -> None:
    """Let two ranks join; check that they are the only ones, and that messages arrive."""
    ranks = [opened.join(rank) for rank in (0, 1)]
    opened.thread.join(60)
    assert not opened.thread.is_alive()
    accepted = dict(opened.accepted)
    assert sorted(accepted) == [0, 1]
    for rank, connection in enumerate(ranks):
        send(connection, {"work": rank}, {})
        assert receive(accepted[rank], 60.0)[0]["work"] == rank
    with pytest.raises(OSError, match=r"refused|No such file"):
        handshake.connected(opened.address)


def test_two_ranks_join(opened: Opened) -> None:
    require_clients(opened)


def test_a_rank_that_comes_again_counts_once(opened: Opened) -> None:
    opened.join(0)
    require_clients(opened)
    assert sorted(rank for rank, _ in opened.accepted) == [0, 0, 1]


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!i", 2**31 - 1) + b"\0" * 60,
        struct.pack("!iQ", -1, 2**63) + b"\0" * 52,
        random.Random(5).randbytes(1 << 16),
    ],
    ids=["nothing", "HTTP", "a large header", "a huge header", "garbage"],
)
def test_connections_without_the_key_are_closed(opened: Opened, sent: bytes) -> None:
    """Whether they are idle, or send what is no MAC; nothing more is sent to them."""
    peers = [opened.peer() for _ in range(4)]
    for peer in peers:
        peer.sendall(sent)
    if len(sent) >= handshake.NONCE_BYTES + handshake.MAC_BYTES:
        for peer in peers:
            with suppress(ConnectionResetError):  # as with what it sent still unread
                assert peer.recv(64) == b""
    require_clients(opened)
    for peer in peers:
        peer.close()


def test_more_connections_than_may_be_pending(opened: Opened) -> None:
    """The oldest are closed; ranks connect meanwhile."""
    peers = [opened.peer() for _ in range(handshake.MOST_PENDING + 5)]
    assert [peer.recv(1) for peer in peers[:5]] == [b""] * 5
    assert len(opened.listener._pending) == handshake.MOST_PENDING
    require_clients(opened)
    assert peers[-1].recv(1) == b""
    for peer in peers:
        peer.close()


def test_a_rank_with_another_key_is_refused(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "RETRY_SECONDS", 0.0)
    with pytest.raises(TimeoutError, match="does not answer"):
        connect_client(opened.address, bytes(32), {"kind": "together", "rank": 0}, 0.0)
    require_clients(opened)


def test_a_pool_that_stops_in_the_middle_of_a_message(opened: Opened) -> None:
    """Whether it sends or reads no more, as when its node is gone: a rank waits no longer than it may for a reply."""
    rank = connect_client(opened.address, KEY, {"kind": "together", "rank": 0}, 0.5)
    opened.join(1)
    opened.thread.join(60)
    accepted = dict(opened.accepted)[0]
    os.write(accepted.fileno(), struct.pack("!i", 100) + b"{")
    with pytest.raises(BlockingIOError):
        receive(rank, 60.0)
    with pytest.raises(BlockingIOError):
        send(rank, {}, {"tokens": torch.zeros(1 << 24)})


def test_a_process_without_the_key_in_place_of_a_pool(tmp_path: Path) -> None:
    """What a rank sends to it is of no use elsewhere, and the rank closes the connection."""
    received = []

    def pretend(server: socket.socket) -> None:
        rank, _ = server.accept()
        with rank:
            rank.sendall(bytes(32))
            received.append(rank.recv(64))
            rank.sendall(received[0][32:])

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        thread = threading.Thread(target=pretend, args=(server,))
        thread.start()
        with pytest.raises(KeyMismatchError, match="does not have the run's key"):
            connect_client(address, KEY, {"kind": "together", "rank": 0}, 60.0)
        thread.join()
    assert KEY not in received[0]
    other = Opened(str(tmp_path / "s"))
    other.open()
    peer = other.peer()
    peer.sendall(received[0])
    assert peer.recv(64) == b""
    require_clients(other)


def test_a_process_of_a_pool_does_not_end_with_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank, whose supervisor ends it, may still save the policy, and would take its end for a failure."""

    class SupervisorAwaitedError(Exception): ...

    def event() -> None:
        raise SupervisorAwaitedError

    replies = []

    def ask() -> None:
        connection = connect_client(str(tmp_path / "s"), KEY, {"kind": "together", "rank": 1}, 60.0)
        send(connection, {"work": "state", "options": {}}, {})
        replies.append(receive(connection, 60.0)[0]["sums"])
        connection.close()

    rank = threading.Thread(target=ask)
    rank.start()
    models: Any = SimpleNamespace(device=None, state=lambda: PoolReply(sums={"loss": [1.0, 2.0]}))
    monkeypatch.setattr(process, "threading", SimpleNamespace(Event=event))
    with pytest.raises(SupervisorAwaitedError):
        process._serve(ClientListener(str(tmp_path / "s"), KEY, 1), models, models)
    rank.join()
    assert replies == [{"loss": [1.0, 2.0]}]


def test_an_address_is_taken_before_models_are_loaded() -> None:
    """Until they are, whoever connects is refused at once."""
    address = f"127.0.0.1:{free_port()}"
    waiting = Opened(address)
    with pytest.raises(OSError, match="in use"):
        ClientListener(address, KEY, 2)
    with pytest.raises(ConnectionRefusedError):
        handshake.connected(address)
    waiting.open()
    require_clients(waiting)

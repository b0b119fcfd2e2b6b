"""Who may ask a process of a pool, and what strangers cost it: over real sockets."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from rlkit_placement import door
from rlkit_placement.door import Door, KeyMismatchError, join_pool
from rlkit_placement.wire import receive, send
from rlkit_servers.process import free_port

from rlkit.types import JsonObject

KEY = bytes(range(32))


class Opened:
    """A door for two clients, in a thread that opens it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.admitted: list[tuple[int, Connection]] = []
        self.door = Door(address, KEY, 2)
        self.thread = threading.Thread(target=self.door.admit_all, args=(self.admit,), daemon=True)

    def admit(self, header: JsonObject, connection: Connection) -> None:
        self.admitted.append((header["rank"], connection))

    def open(self) -> None:
        self.thread.start()
        while True:
            with suppress(ConnectionRefusedError):  # until it listens
                return door.connected(self.address).close()

    def join(self, rank: int, key: bytes = KEY) -> Connection:
        return join_pool(self.address, key, {"kind": "together", "rank": rank}, 60.0)

    def stranger(self) -> socket.socket:
        stranger = door.connected(self.address)
        assert len(stranger.recv(64)) == door.NONCE_BYTES
        return stranger


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
    admitted = dict(opened.admitted)
    assert sorted(admitted) == [0, 1]
    for rank, connection in enumerate(ranks):
        send(connection, {"work": rank}, {})
        assert receive(admitted[rank], 60.0)[0]["work"] == rank
    with pytest.raises(OSError, match=r"refused|No such file"):
        door.connected(opened.address)


def test_two_ranks_join(opened: Opened) -> None:
    require_clients(opened)


def test_a_rank_that_comes_again_counts_once(opened: Opened) -> None:
    opened.join(0)
    require_clients(opened)
    assert [rank for rank, _ in opened.admitted] == [0, 0, 1]


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
def test_strangers_are_turned_away(opened: Opened, sent: bytes) -> None:
    """Whether they stay silent, or send what is no proof; then nothing more is said to them."""
    strangers = [opened.stranger() for _ in range(4)]
    for stranger in strangers:
        stranger.sendall(sent)
    if len(sent) >= door.NONCE_BYTES + door.PROOF_BYTES:
        for stranger in strangers:
            with suppress(ConnectionResetError):  # as with what it sent still unread
                assert stranger.recv(64) == b""
    require_clients(opened)
    for stranger in strangers:
        stranger.close()


def test_more_strangers_than_may_wait(opened: Opened) -> None:
    """Those that wait longest are ended; the ranks get in meanwhile."""
    strangers = [opened.stranger() for _ in range(door.MOST_PENDING + 5)]
    assert [stranger.recv(1) for stranger in strangers[:5]] == [b""] * 5
    assert len(opened.door._pending) == door.MOST_PENDING
    require_clients(opened)
    assert strangers[-1].recv(1) == b""
    for stranger in strangers:
        stranger.close()


def test_a_rank_with_another_key_is_refused(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "RETRY_SECONDS", 0.0)
    with pytest.raises(TimeoutError, match="does not answer"):
        join_pool(opened.address, bytes(32), {"kind": "together", "rank": 0}, 0.0)
    require_clients(opened)


def test_a_stranger_in_place_of_a_pool_learns_nothing(tmp_path: Path) -> None:
    """What a rank sends it proves nothing elsewhere, and the rank does not stay with it."""
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
        with pytest.raises(KeyMismatchError, match="no process of this run's pools"):
            join_pool(address, KEY, {"kind": "together", "rank": 0}, 60.0)
        thread.join()
    assert KEY not in received[0]
    other = Opened(str(tmp_path / "s"))
    other.open()
    stranger = other.stranger()
    stranger.sendall(received[0])
    assert stranger.recv(64) == b""
    require_clients(other)


def test_an_address_is_taken_before_models_are_loaded() -> None:
    """Until they are, whoever connects is refused at once."""
    address = f"127.0.0.1:{free_port()}"
    waiting = Opened(address)
    with pytest.raises(OSError, match="in use"):
        Door(address, KEY, 2)
    with pytest.raises(ConnectionRefusedError):
        door.connected(address)
    waiting.open()
    require_clients(waiting)

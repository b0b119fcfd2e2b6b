"""Connections between the trainer's ranks and a pool's processes: each side authenticates itself with the run's key.

The process of a pool sends 32 random bytes, the nonce. The rank answers with a nonce of its own and a MAC of both; the
process answers with another MAC. The key itself is never sent, and a MAC is of use neither in another connection nor
at another address. Before the MAC at most 64 bytes of a connection are read, and at most `MOST_PENDING` connections
are held, of which a newer one closes the oldest. So connections without the key, idle or hostile, and however many,
cost a rank another try at most.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

from rlkit.types import JsonObject
from rlkit_placement.wire import receive, send

Accept = Callable[[JsonObject, Connection], None]
"""Takes a client's header and its connection."""

MOST_PENDING = 64
HANDSHAKE_SECONDS = 10.0
"""How long a rank waits for an answer of a pool's process before it tries again."""
RETRY_SECONDS = 0.2
NONCE_BYTES = MAC_BYTES = 32


class KeyMismatchError(ConnectionError):
    """What listens at the address of a pool's process does not have the run's key."""


class ClientListener:
    """Accepts the clients of a process, until all have connected.

    Args:
        address: Where it listens, `host:port` or the path of a Unix socket; others cannot take it from here on.
        key: The run's.
        expected: How many clients.

    Raises:
        OSError: The address is in use, or none of this machine.
    """

    def __init__(self, address: str, key: bytes, expected: int) -> None:
        self._address, self._key, self._expected = address, key, expected
        family, target = _target(address)
        self._listener = socket.socket(family)
        self._listener.bind(target)
        self._pending: list[socket.socket] = []
        self._clients: set[str] = set()
        self._lock = threading.Lock()
        self._is_complete = threading.Event()

    def accept_all(self, accept: Accept) -> None:
        """Listen until all clients have authenticated themselves and sent a header.

        Args:
            accept: Called for each client, once more if it connects again.
        """
        self._listener.listen(MOST_PENDING)
        while not self._is_complete.is_set():
            try:
                peer, _ = self._listener.accept()
            except OSError:  # as with too many open files, while pending connections have some
                time.sleep(RETRY_SECONDS)
                continue
            self._begin(peer, accept)
        self._listener.close()
        with self._lock:
            for peer in self._pending:
                _end(peer)

    def _begin(self, peer: socket.socket, accept: Accept) -> None:
        """Begin a connection's handshake; close the oldest that has not finished its own, if there are too many."""
        with self._lock:
            self._pending.append(peer)
            if len(self._pending) > max(MOST_PENDING, 2 * self._expected):
                _end(self._pending.pop(0))
        threading.Thread(target=self._handshake, args=(peer, accept), daemon=True).start()

    def _handshake(self, peer: socket.socket, accept: Accept) -> None:
        with peer, suppress(OSError, EOFError):
            mac = self._answer_to(peer)
            if self._remove(peer) and mac:
                peer.sendall(mac)
                connection = _connection(peer)
                header, _ = receive(connection)
                accept(header, connection)
                self._count(str(sorted(header.items())))
        self._remove(peer)

    def _answer_to(self, peer: socket.socket) -> bytes:
        """Return this side's MAC for a peer that has the key; nothing for another."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        peer.sendall(nonce)
        answer = _read(peer, NONCE_BYTES + MAC_BYTES)
        nonces = nonce + answer[:NONCE_BYTES]
        if not hmac.compare_digest(answer[NONCE_BYTES:], _mac(self._key, "rank", self._address, nonces)):
            return b""
        return _mac(self._key, "pool", self._address, nonces)

    def _remove(self, peer: socket.socket) -> bool:
        """Remove a connection from the pending ones; return whether it was one, and not closed meanwhile."""
        with self._lock:
            was_pending = peer in self._pending
            if was_pending:
                self._pending.remove(peer)
            return was_pending

    def _count(self, client: str) -> None:
        with self._lock:
            self._clients.add(client)
            if len(self._clients) == self._expected:
                self._is_complete.set()
        if self._is_complete.is_set():
            with suppress(OSError):
                connected(self._address).close()  # ends `accept`


def connect_client(address: str, key: bytes, header: JsonObject, seconds: float) -> Connection:
    """Connect to a process of a pool, authenticate both sides, and send the header.

    Later a message in either direction, once begun, must also go on within so many seconds, or a `BlockingIOError` is
    raised: the other node may be gone.

    Raises:
        TimeoutError: The process does not answer within so many seconds.
        KeyMismatchError: It does not have the key.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return _connect(address, key, header, seconds)
        except KeyMismatchError:
            raise
        except (OSError, EOFError) as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{address} does not answer: {error}") from error
            time.sleep(RETRY_SECONDS)


def _connect(address: str, key: bytes, header: JsonObject, seconds: float) -> Connection:
    with connected(address) as process:
        nonces = _read(process, NONCE_BYTES) + secrets.token_bytes(NONCE_BYTES)
        process.sendall(nonces[NONCE_BYTES:] + _mac(key, "rank", address, nonces))
        if not hmac.compare_digest(_read(process, MAC_BYTES), _mac(key, "pool", address, nonces)):
            raise KeyMismatchError(f"what listens at {address} does not have the run's key")
        connection = _connection(process)
        limit = struct.pack("ll", *divmod(round(seconds * 1e6), 10**6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            process.setsockopt(socket.SOL_SOCKET, option, limit)
    send(connection, header, {})
    return connection


def connected(address: str) -> socket.socket:
    """Return a connection to an address; it waits `HANDSHAKE_SECONDS` for each reply.

    Raises:
        OSError: Nothing listens there.
    """
    family, target = _target(address)
    process = socket.socket(family)
    process.settimeout(HANDSHAKE_SECONDS)
    try:
        process.connect(target)
    except BaseException:
        process.close()
        raise
    return process


def _connection(peer: socket.socket) -> Connection:
    """Return a connection for messages over a copy of a socket, which stays open when the socket is closed."""
    peer.settimeout(None)
    if peer.family != socket.AF_UNIX:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Connection(os.dup(peer.fileno()))


def _target(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    if address.startswith("/"):
        return socket.AF_UNIX, address
    host, _, port = address.rpartition(":")
    return socket.AF_INET6 if ":" in host else socket.AF_INET, (host, int(port))


def _mac(key: bytes, side: str, address: str, nonces: bytes) -> bytes:
    """Return the MAC of a side, for this address and these connection's nonces alone."""
    return hmac.digest(key, f"rlkit pool {side} {address} ".encode() + nonces, "sha256")


def _read(peer: socket.socket, size: int) -> bytes:
    """Read exactly so many bytes.

    Raises:
        EOFError: The other side has closed the connection.
    """
    read = b""
    while len(read) < size:
        part = peer.recv(size - len(read))
        if not part:
            raise EOFError("it has closed the connection")
        read += part
    return read


def _end(peer: socket.socket) -> None:
    with suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)

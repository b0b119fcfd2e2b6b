"""How a rank of the trainer and a process of a pool meet: each proves that it has the run's key, which is never sent.

The pool's process sends 32 random bytes; the rank answers with 32 of its own and a MAC of both; the process answers
with another MAC. Until then at most 64 bytes are read from a connection, and at most `MOST_PENDING` connections are
held, of which a newer one ends the oldest. So strangers who are silent, who send anything, or who come in any number,
cost the run's ranks at most another try.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

from rlkit.types import JsonObject
from rlkit_placement.wire import receive, send

MOST_PENDING = 64
HANDSHAKE_SECONDS = 10.0
"""How long a rank waits for an answer of a pool's process before it tries again."""
RETRY_SECONDS = 0.2
NONCE_BYTES = PROOF_BYTES = 32


class KeyMismatchError(ConnectionError):
    """What listens at the address of a pool's process does not have the run's key."""


class Door:
    """Where the clients of a process enter, until all are there.

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

    def admit_all(self, admit: Callable[[JsonObject, Connection], None]) -> None:
        """Listen until all clients have shown the key and said who they are.

        Args:
            admit: Called with what each client says of itself, and its connection; of one that comes again, once more.
        """
        self._listener.listen(MOST_PENDING)
        while not self._is_complete.is_set():
            try:
                stranger, _ = self._listener.accept()
            except OSError:  # as with too many open files; those of strangers are closed soon
                time.sleep(RETRY_SECONDS)
                continue
            self._begin(stranger, admit)
        self._listener.close()
        with self._lock:
            for stranger in self._pending:
                _end(stranger)

    def _begin(self, stranger: socket.socket, admit: Callable[[JsonObject, Connection], None]) -> None:
        """Ask a stranger for the key; end the connection that waits longest, if there are too many."""
        with self._lock:
            self._pending.append(stranger)
            if len(self._pending) > max(MOST_PENDING, 2 * self._expected):
                _end(self._pending.pop(0))
        threading.Thread(target=self._ask, args=(stranger, admit), daemon=True).start()

    def _ask(self, stranger: socket.socket, admit: Callable[[JsonObject, Connection], None]) -> None:
        with stranger, suppress(OSError, EOFError):
            proof = self._proof_for(stranger)
            if self._forget(stranger) and proof:
                stranger.sendall(proof)
                connection = _connection(stranger)
                header, _ = receive(connection)
                admit(header, connection)
                self._count(str(sorted(header.items())))
        self._forget(stranger)

    def _proof_for(self, stranger: socket.socket) -> bytes:
        """Return this side's proof for a connection that has the key; nothing for another."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        stranger.sendall(nonce)
        answer = _read(stranger, NONCE_BYTES + PROOF_BYTES)
        nonces = nonce + answer[:NONCE_BYTES]
        if not hmac.compare_digest(answer[NONCE_BYTES:], _proof(self._key, "rank", self._address, nonces)):
            return b""
        return _proof(self._key, "pool", self._address, nonces)

    def _forget(self, stranger: socket.socket) -> bool:
        """Take a connection off those that wait; return whether it has waited, and was not ended meanwhile."""
        with self._lock:
            waited = stranger in self._pending
            if waited:
                self._pending.remove(stranger)
            return waited

    def _count(self, client: str) -> None:
        with self._lock:
            self._clients.add(client)
            if len(self._clients) == self._expected:
                self._is_complete.set()
        if self._is_complete.is_set():
            with suppress(OSError):
                connected(self._address).close()  # ends `accept`


def join_pool(address: str, key: bytes, header: JsonObject, seconds: float) -> Connection:
    """Connect to a process of a pool, and say who this is.

    Raises:
        TimeoutError: The process does not answer within so many seconds.
        KeyMismatchError: It does not have the key.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return _join(address, key, header)
        except KeyMismatchError:
            raise
        except (OSError, EOFError) as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{address} does not answer: {error}") from error
            time.sleep(RETRY_SECONDS)


def _join(address: str, key: bytes, header: JsonObject) -> Connection:
    with connected(address) as process:
        nonces = _read(process, NONCE_BYTES) + secrets.token_bytes(NONCE_BYTES)
        process.sendall(nonces[NONCE_BYTES:] + _proof(key, "rank", address, nonces))
        if not hmac.compare_digest(_read(process, PROOF_BYTES), _proof(key, "pool", address, nonces)):
            raise KeyMismatchError(f"what listens at {address} is no process of this run's pools")
        connection = _connection(process)
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


def _proof(key: bytes, side: str, address: str, nonces: bytes) -> bytes:
    """Return the MAC by which a side shows the key, for this address and these connection's nonces alone."""
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
            raise EOFError
        read += part
    return read


def _end(stranger: socket.socket) -> None:
    with suppress(OSError):
        stranger.shutdown(socket.SHUT_RDWR)

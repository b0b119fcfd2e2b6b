"""The one HTTP client against hostile services: nothing is followed elsewhere, read without end, or waited for."""

from __future__ import annotations

import asyncio
import gzip
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from rlkit_judges.client import JudgeClient
from rlkit_judges.prompts import Question
from rlkit_judges.server import JudgeError, JudgeServer
from rlkit_servers.http import Client

from rlkit.base.errors import RecipeError
from rlkit.base.retry import HttpClient, RetryPolicy, ServiceError, fetch, proxy_for
from rlkit.interfaces.reward import as_score
from rlkit.rewards import RemoteReward
from rlkit.testing import example_trajectory
from rlkit.types import Score

Respond = Callable[[socket.socket], object]
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
KIB = b"x" * 1024


class RawServer:
    """What a server of plain sockets has received, and the connections that clients have left."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.requests: list[bytes] = []
        self.threads: list[threading.Thread] = []

    def serve(self, respond: Respond) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                self.threads.append(threading.Thread(target=self._answer, args=(connection, respond), daemon=True))
                self.threads[-1].start()

    def _answer(self, connection: socket.socket, respond: Respond) -> None:
        with connection, suppress(OSError):
            request = b""
            while b"\r\n\r\n" not in request:
                request += connection.recv(2**16)
            self.requests.append(request)
            respond(connection)


@contextmanager
def serving(respond: Respond | bytes) -> Iterator[RawServer]:
    """Serve in threads, each of which must end once its client has left."""
    server = RawServer()
    answer = respond if callable(respond) else lambda connection: connection.sendall(respond)
    thread = threading.Thread(target=server.serve, args=(answer,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.listener.shutdown(socket.SHUT_RDWR)
        server.listener.close()
        for connection in server.threads:
            connection.join(30)
            assert not connection.is_alive(), "the client has not closed its connection"


def endless(piece: bytes, head: bytes = CHUNKED) -> Respond:
    def respond(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))

    return respond


def drip(connection: socket.socket) -> None:
    """Send a byte at a time, until the client leaves."""
    connection.sendall(OK + b"Content-Length: 1000000\r\n\r\n")
    connection.settimeout(0.02)
    while True:
        connection.sendall(b" ")
        with suppress(TimeoutError):
            if not connection.recv(1):
                return


def silent(connection: socket.socket) -> None:
    while connection.recv(2**16):
        pass


def ask(url: str, seconds: float = 30.0) -> object:
    client = HttpClient(url, max_bytes=2**16)

    async def post() -> object:
        try:
            return await client.post_json("/score", b"{}", seconds)
        finally:
            await client.finish()

    return asyncio.run(post())


HOSTILE: dict[str, tuple[Respond | bytes, float, str]] = {
    "endless": (endless(KIB), 30.0, "answered more than 65,536 bytes"),
    "endless error": (endless(KIB, b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n"), 30.0, "answered more"),
    "slow": (drip, 0.2, "did not answer within 0.2 s"),
    "silent": (silent, 0.2, "did not answer within 0.2 s"),
    "bomb": (
        OK + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(bytes(2**22)),
        30.0,
        "a compressed body, which was not asked for",
    ),
    "headers": (OK + b"".join(b"X-%d: %b\r\n" % (i, KIB) for i in range(500)) + b"\r\n", 30.0, "failed with"),
    "no http": (b"SSH-2.0-OpenSSH\r\n\r\n", 30.0, "failed with"),
    "truncated": (OK + b"Content-Length: 99\r\n\r\n{}", 30.0, "failed with ClientPayloadError"),
    "no object": (OK + b"Content-Length: 2\r\n\r\n[]", 30.0, "expected an object"),
    "deep": (OK + b"Content-Length: 60000\r\n\r\n" + b"[" * 60_000, 30.0, "failed with RecursionError"),
    "closed": (lambda connection: connection.close(), 30.0, "failed with ServerDisconnectedError"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_service_is_an_error_in_one_line(kind: str) -> None:
    respond, seconds, message = HOSTILE[kind]
    with serving(respond) as server, pytest.raises(ServiceError, match=message) as raised:
        ask(server.url, seconds)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_takes_the_login_elsewhere(status: int) -> None:
    with serving(b"") as other:
        redirect = b"HTTP/1.1 %d Moved\r\nLocation: %b/?token=secret\r\nContent-Length: 0\r\n\r\n"
        with serving(redirect % (status, other.url.encode())) as server:
            with pytest.raises(ServiceError, match=f"answered {status}: a redirect to 127.0.0.1") as raised:
                ask(server.url.replace("//", "//me:p%40ss@"))
            assert b"Authorization: Basic bWU6cEBzcw==" in server.requests[0]
        assert other.requests == []
        assert "secret" not in str(raised.value)


@pytest.mark.parametrize("location", ["", "http://[", "/elsewhere", "\\x", "javascript:1"])
def test_a_redirect_to_nonsense_is_an_error(location: str) -> None:
    answer = b"HTTP/1.1 302 Moved\r\nLocation: %b\r\nContent-Length: 4\r\n\r\na\nb\n" % location.encode()
    with serving(answer) as server:
        with pytest.raises(ServiceError, match="answered 302: a redirect to no other host"):
            ask(server.url)
        with pytest.raises(ServiceError, match="answered 302: a redirect to no other|failed with"):
            fetch(server.url, 99, 30.0, private=True)


def test_a_body_in_chunks_is_read_whole() -> None:
    def respond(connection: socket.socket) -> None:
        connection.sendall(CHUNKED)
        for piece in (b'{"scores"', b": [1, ", b"2]}"):
            connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        connection.sendall(b"0\r\n\r\n")

    with serving(respond) as server:
        assert ask(server.url) == {"scores": [1, 2]}
        assert fetch(f"{server.url}/a", 99, 30.0, private=True) == b'{"scores": [1, 2]}'


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]"]
)
def test_an_address_of_data_is_not_private(host: str) -> None:
    with serving(OK + b"\r\nsecret") as server:
        port = server.url.rpartition(":")[2]
        with pytest.raises(ServiceError, match="private address|failed with") as raised:
            fetch(f"http://{host}:{port}/a.png", 99, 30.0)
        assert server.requests == []
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1", "172.16.3.4", "192.168.1.1", "169.254.169.254", "100.64.0.1", "224.0.0.1", "[fe80::1]", "[fec0::1]",
        "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[::ffff:10.0.0.1]",
    ],
)  # fmt: skip
def test_no_address_of_a_network_is_connected_to(address: str) -> None:
    with pytest.raises(ServiceError, match="is a private address, which data may not name"):
        fetch(f"http://{address}/latest/meta-data", 99, 30.0)


def test_data_follow_redirects_within_a_host_only() -> None:
    def respond(connection: socket.socket) -> None:
        to = b"/b" if b"GET /a " in server.requests[-1] else b""
        status = OK if b"GET /b " in server.requests[-1] else b"HTTP/1.1 302 Found\r\nLocation: %b\r\n" % to
        connection.sendall(status + b"Content-Length: 2\r\n\r\nhi")

    with serving(respond) as server:
        assert fetch(f"{server.url}/a", 99, 30.0, private=True) == b"hi"
        with pytest.raises(ServiceError, match="answered 302: a redirect to .*, which is not followed"):
            fetch(f"{server.url}/loop", 99, 30.0, private=True)
    away = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.2:1/\r\nContent-Length: 0\r\n\r\n"
    with serving(away) as server, pytest.raises(ServiceError, match="a redirect to 127.0.0.2:1, which is not"):
        fetch(server.url, 99, 30.0, private=True)


@pytest.mark.parametrize("kind", ["endless", "slow", "silent", "bomb"])
def test_an_address_of_data_does_not_hang(kind: str) -> None:
    respond, seconds, message = HOSTILE[kind]
    with serving(respond) as server, pytest.raises(ServiceError, match=message):
        fetch(server.url, 2**16, seconds, private=True)


@pytest.mark.parametrize("url", ["ftp://example.com/a", "http://", "http://[bad/", "file:///etc/passwd"])
def test_addresses_that_are_none_are_errors(url: str) -> None:
    with pytest.raises(ServiceError, match="failed with"):
        fetch(url, 99, 30.0)


def test_an_address_without_a_host_is_refused_at_once() -> None:
    with pytest.raises(RecipeError, match=r"'http://\[bad' is no address .*, expected http://"):
        RemoteReward("http://[bad")


def test_the_environments_proxy_is_that_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    assert proxy_for("http://scorer.example/score") == "http://proxy:3128"
    assert proxy_for("http://me:pw@127.0.0.1:8000/score") is None
    assert proxy_for("https://scorer.example/") is None
    monkeypatch.setenv("https_proxy", "proxy:3128")
    assert proxy_for("https://scorer.example/") == "http://proxy:3128"


@pytest.mark.parametrize("kind", ["endless", "slow"])
def test_remote_reward_reads_no_endless_body(kind: str) -> None:
    """The connection is closed: after its deadline, too, nothing is read."""
    with serving(HOSTILE[kind][0]) as server:
        reward = RemoteReward(server.url, retry=RetryPolicy(retries=0, attempt_seconds=0.3 if kind == "slow" else None))

        async def score() -> list[Score]:
            try:
                return await reward.score([example_trajectory("a")])
            finally:
                await reward._http.finish()

        expected = "answered more than 4,194,304 bytes" if kind == "endless" else "did not answer within 0.3 s"
        with pytest.raises(ConnectionError, match=expected):
            asyncio.run(score())


@pytest.mark.parametrize("name", ["a\nb,c", "../../x", "/etc/passwd", "", "a" * 65, "a//b", "\x1b[31m", "a,b"])
def test_names_of_components_are_plain(name: str) -> None:
    score = as_score(Score(1.0, {name: 1.0}), "RemoteReward")
    assert (score.error or "").startswith("RemoteReward returned the component ")
    assert "\n" not in (score.error or "")


def test_components_are_few() -> None:
    error = as_score(Score(1.0, {f"c{i}": 1.0 for i in range(3000)})).error
    assert (error or "").startswith("the reward returned 3,000 components, expected at most 256")
    plain = {"accuracy": 1.0, "exact match": 0.5, "judge/taste (1-5)": 3.0, "größe": 1.0}
    assert as_score(Score(1.0, plain)).components == plain


def test_no_key_of_the_environment_goes_to_an_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither those that tools read, nor the login of a host in `.netrc`; only what the recipe's own address says."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password s3cret\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("RLKIT_JUDGE_KEY", "s3cret")
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "s3cret")
    body = b'{"scores": [1.0]}'
    with serving(OK + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body) as server:
        asyncio.run(_call_all(server.url))
    assert len(server.requests) == 3
    for request in server.requests:
        head = request.partition(b"\r\n\r\n")[0].lower()
        assert b"s3cret" not in request
        assert not {b"authorization", b"x-api-key", b"cookie"} & {line.split(b":")[0] for line in head.split(b"\r\n")}


async def _call_all(url: str) -> None:
    reward = RemoteReward(url, retry=RetryPolicy(retries=0))
    judge = JudgeClient(JudgeServer(f"{url}/v1", "m", retry=RetryPolicy(retries=0), corrections=0))
    engine = Client(url)
    await reward.score([example_trajectory("4")])
    with pytest.raises(JudgeError):
        await judge.ask(Question("Which?", {"type": "object"}), dict)
    await engine.get("/info", 5.0)
    for client in (reward._http, judge._http, engine):
        await client.finish()

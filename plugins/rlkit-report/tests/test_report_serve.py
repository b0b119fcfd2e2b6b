"""`rlkit report --serve`: the page, nothing but the page, and as the runs are now."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from rlkit_report.files import RunFiles
from rlkit_report.server import Pages, ReportServer
from test_report import data_of

from rlkit.cli.main import main
from rlkit.run.folder import RunFolder
from tests.run_folders import trajectory, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", steps=1)


@pytest.fixture
def server(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReportServer]:
    monkeypatch.setattr("rlkit_report.server.SHARE", 1.0)  # as often as it is asked for
    with ReportServer(Pages(lambda: [RunFiles(run, 1e9)]), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: ReportServer, path: str | None = None, method: str = "GET", **headers: str) -> tuple[HTTPResponse, str]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.putrequest(method, server.page_path if path is None else path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    return answer, answer.read().decode()


def test_the_page_is_that_of_the_run_as_it_is_now(server: ReportServer, run: Path) -> None:
    answer, text = ask(server)
    assert answer.status == 200
    first = data_of(text)
    assert first["runs"][0]["steps"] == [0, 1]
    assert answer.headers["ETag"] == f'"{first["version"]}"'
    for method in ("GET", "HEAD"):  # the folder has not changed
        assert ask(server, method=method)[0].headers["ETag"] == answer.headers["ETag"]
    RunFolder(run, "").dump("step-00002", [trajectory("new", 0, 1.0)])
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "reward/mean": 1.0}) + "\n")
    head, nothing = ask(server, method="HEAD")
    assert head.headers["ETag"] != answer.headers["ETag"]
    assert (nothing, int(head.headers["Content-Length"]) > 50_000) == ("", True)
    second = data_of(ask(server)[1])
    assert second["runs"][0]["steps"] == [0, 1, 2]
    assert second["index"]["names"]["prompt"][-1] == "new"


def test_a_page_is_not_built_more_often_than_a_share_of_the_time(
    server: ReportServer, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlkit_report.server.SHARE", 1e-9)
    first, *others = [asked_after(text, server, run) for text in ("", "{}\n", "[]\n")]
    assert others[0] != first  # the first one also loads the tokenizer
    assert others[1] == others[0]


def asked_after(metrics: str, server: ReportServer, run: Path) -> str | None:
    """Return the version of the page after a change of the run."""
    (run / "metrics.jsonl").write_text(metrics)
    return ask(server, method="HEAD")[0].headers["ETag"]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::", "", "10.0.0.1"])
def test_requests_for_another_host_are_refused(server: ReportServer, host: str) -> None:
    """A name that was made to point at this machine after the browser had loaded a page from elsewhere."""
    answer, text = ask(server, Host=host)
    assert answer.status == 403
    assert data_of(text) == {}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9000", "LOCALHOST", "[::1]:1"])
def test_requests_through_a_tunnel_are_answered(server: ReportServer, host: str) -> None:
    assert ask(server, method="HEAD", Host=host)[0].status == 200


PATHS = ("/", "/report.html", "{place}recipe.yaml", "{place}../recipe.yaml", "{place}%2e%2e/", "/%ff", "*")


@pytest.mark.parametrize("path", PATHS)
def test_nothing_else_is_served(server: ReportServer, path: str) -> None:
    answer, text = ask(server, path.format(place=server.page_path))
    assert answer.status == 404
    assert data_of(text) == {}


TOO_LONG = "GET /" + "a" * 70_000 + " HTTP/1.1"


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("GET http://[x/ HTTP/1.1", 400), ("HEAD http://[x/ HTTP/1.1", 400), ("GET http://\u2100/ HTTP/1.1", 404),
        ("GET", 400), ("GET / HTTP/x", 400), ("GET / / HTTP/1.1", 400), (TOO_LONG, 414),
    ],
)  # fmt: skip
def test_malformed_requests_are_refused(
    server: ReportServer, line: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as connection:
        connection.sendall(f"{line}\r\nHost: 127.0.0.1\r\n\r\n".encode())
        answer = connection.makefile("rb").read(4096).decode("latin-1")
    assert str(status) in answer.partition("\n")[0] or f"Error code: {status}" in answer
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_the_page_is_only_read(server: ReportServer, method: str) -> None:
    assert ask(server, method=method)[0].status == 501


def test_pages_of_other_sites_can_neither_frame_nor_read_it(server: ReportServer) -> None:
    headers = ask(server, method="HEAD")[0].headers
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in headers


def test_a_served_page_may_ask_its_server_alone(server: ReportServer) -> None:
    policy = re.search(r'content="(default-src[^"]+)"', ask(server)[1])
    assert policy is not None
    assert "connect-src 'self'; base-uri 'none'" in policy[1]


def test_a_page_that_cannot_be_built_is_an_error_once(
    server: ReportServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr("tempfile.TemporaryFile", Path("/nowhere/at/all").stat)
        assert ask(server)[0].status == 500
    assert "warning: the page cannot be built: " in capsys.readouterr().out
    assert ask(server)[0].status == 200


def test_a_reader_that_has_gone_is_no_error(server: ReportServer, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.server_port)) as gone:
            gone.sendall(f"GET {server.page_path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # it is reset
    assert ask(server)[0].status == 200
    assert capsys.readouterr().err == ""


def test_a_port_that_is_in_use_is_explained(
    server: ReportServer, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run), "--serve", "--port", str(server.server_port)]) == 2
    assert f"--port is {server.server_port}, which cannot be used: " in capsys.readouterr().err


@pytest.mark.slow
def test_the_server_is_local_and_runs_until_interrupted(run: Path) -> None:
    (run / "recipe.yaml").write_text("task: Arithmetic\n")  # without a model, of which it would load the tokenizer
    before = sorted(run.rglob("*"))
    command = (sys.executable, "-m", "rlkit", "report", str(run), "--serve", "--port", "0")
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if not line.startswith("warning: "))
        url = urlsplit(line.split(": ")[0])
        assert (url.scheme, url.hostname) == ("http", "127.0.0.1"), line
        connection = HTTPConnection("127.0.0.1", url.port or 0, timeout=60)
        connection.request("GET", url.path)
        assert data_of(connection.getresponse().read().decode())["runs"][0]["name"] == str(run)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", url.port or 0), timeout=10)
        process.send_signal(signal.SIGTERM)  # as Ctrl-C, which a shell's background command ignores
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, error) == (130, "interrupted\n")
    assert sorted(run.rglob("*")) == before

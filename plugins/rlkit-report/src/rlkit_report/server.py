"""`rlkit report --serve`: the page on 127.0.0.1, built again when it is asked for and a run's folder has changed."""

from __future__ import annotations

import os
import secrets
import socketserver
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import IO, NamedTuple
from urllib.parse import urlsplit

from rlkit.base.errors import RecipeError, RlkitError, explain
from rlkit.base.signals import raised
from rlkit.base.terminal import echo
from rlkit_report.files import RunFiles
from rlkit_report.page import write

HOST = "127.0.0.1"

NAMES = (HOST, "localhost", "::1")
"""Hosts that a request may be for: a page of another name that an attacker points at this machine reads nothing."""

SHARE = 0.1
"""The share of the time that building the page may take."""

PIECE = 1 << 20
"""Bytes that are sent at once."""

HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Built(NamedTuple):
    """A page that was built: a file without a name, its size, and the version that is in it."""

    file: IO[bytes]
    size: int
    version: str


class Pages:
    """Builds the page of runs, at most as often as their folders change.

    Args:
        open_runs: Returns the runs, to be read from the beginning.
    """

    def __init__(self, open_runs: Callable[[], Sequence[RunFiles]]) -> None:
        self._open_runs = open_runs
        self._lock = threading.Lock()
        self._began = secrets.token_hex(4)
        self._count = 0
        self._next = 0.0
        self._state: object = None
        self._built: Built | None = None
        self._noted: set[str] = set()

    def newest(self) -> Built:
        """Return the page as it is now.

        Raises:
            OSError: It cannot be written.
        """
        with self._lock:
            if self._built is None or time.monotonic() >= self._next:
                runs = self._open_runs()
                state = [run.state() for run in runs]
                if self._built is None or state != self._state:
                    self._built, self._state = self._build(runs), state
            return self._built

    def _build(self, runs: Sequence[RunFiles]) -> Built:
        start = time.monotonic()
        file = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as a request reads it)
        self._count += 1
        version = f"{self._began}-{self._count}"
        write(file, runs, version)
        file.flush()
        for note in (note for run in runs for note in run.notes if note not in self._noted):
            self._noted.add(note)
            echo(f"warning: {note}")
        end = time.monotonic()
        if self._count > 1:  # the first one also loads the tokenizer
            self._next = end + (end - start) * (1 / SHARE - 1)
        return Built(file, file.tell(), version)


class ReportServer(ThreadingHTTPServer):
    """Serves the page under a path that nobody else on this machine can guess.

    Args:
        pages: The page.
        port: Where it listens; 0 for any that is free.

    Raises:
        RecipeError: The port cannot be used.
    """

    daemon_threads = True

    def __init__(self, pages: Pages, port: int) -> None:
        self.pages = pages
        self.page_path = f"/{secrets.token_urlsafe(12)}/"
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            raise RecipeError(
                f"--port is {port}, which cannot be used: {explain(error)}; choose another, 0 for any that is free"
            ) from error

    def server_bind(self) -> None:
        """Bind without looking for the machine's name, which may ask a network."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:
        """Print what went wrong in a request, unless its reader has gone."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        """The page's address."""
        return f"http://{HOST}:{self.server_port}{self.page_path}"


class Handler(BaseHTTPRequestHandler):
    """Answers requests for the page, and refuses all others."""

    server: ReportServer
    server_version = "rlkit"
    sys_version = ""
    timeout = 60

    def do_GET(self) -> None:
        """Send the page."""
        built = self._answer()
        if built:
            for offset in range(0, built.size, PIECE):
                self.wfile.write(os.pread(built.file.fileno(), PIECE, offset))

    def do_HEAD(self) -> None:
        """Send the page's version."""
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: a page asks every few seconds."""

    def _answer(self) -> Built | None:
        """Send the headers; return the page if it is what was asked for."""
        hosts = self.headers.get_all("Host", [])
        path = _path(self.path)
        if path is None:
            self.send_error(HTTPStatus.BAD_REQUEST, "the address is malformed")
        elif len(hosts) != 1 or _name(hosts[0]) not in NAMES:
            self.send_error(HTTPStatus.FORBIDDEN, f"expected one of {', '.join(NAMES)} as the host")
        elif not secrets.compare_digest(path.encode(), self.server.page_path.encode()):
            self.send_error(HTTPStatus.NOT_FOUND, "expected the address that rlkit report printed")
        else:
            try:
                built = self.server.pages.newest()
            except (OSError, RlkitError) as error:
                echo(f"warning: the page cannot be built: {explain(error)}")
                self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, "the page cannot be built; the terminal shows why")
                return None
            self.send_response(HTTPStatus.OK)
            for name, value in {**HEADERS, "Content-Length": str(built.size), "ETag": f'"{built.version}"'}.items():
                self.send_header(name, value)
            self.end_headers()
            return built
        return None


def _name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _path(address: str) -> str | None:
    try:
        return urlsplit(address).path
    except ValueError:
        return None


def serve(open_runs: Callable[[], Sequence[RunFiles]], port: int) -> int:
    """Serve the report of runs until it is interrupted.

    Args:
        open_runs: Returns the runs, to be read from the beginning.
        port: Where it listens; 0 for any that is free.
    """
    pages = Pages(open_runs)
    with raised(), ReportServer(pages, port) as server:
        built = pages.newest()
        echo(f"{server.url}: {built.size / 1e6:.1f} MB, read again as the runs go on; Ctrl-C ends it")
        sys.stdout.flush()
        server.serve_forever()
    return 0

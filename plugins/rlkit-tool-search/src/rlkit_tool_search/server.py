"""The search server: one index for any number of trainers, JSON in and out."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rlkit_tool_search.index import Index, Passage

LARGEST_BODY = 1 << 20
LARGEST_TOP_K = 100


class SearchServer(ThreadingHTTPServer):
    """Answers `POST /search` {"query", "top_k"} with {"passages": […]}, and `GET /` with how many passages there are.

    A request that is wrong gets {"error"} and a status of 400 or more. Port 0 takes a free one: see `server_port`.
    """

    daemon_threads = True
    request_queue_size = 1024  # a step's conversations may all search at once

    def __init__(self, index: Index, host: str = "127.0.0.1", port: int = 0) -> None:
        self.index = index
        super().__init__((host, port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: SearchServer
    timeout = 30  # seconds for a client to send what it announced

    def do_GET(self) -> None:
        self._answer(200, {"passages": len(self.server.index)})

    def do_POST(self) -> None:
        if self.path != "/search":
            return self._answer(404, {"error": f"no {self.path} here, expected POST /search"})
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > LARGEST_BODY:
            return self._answer(413, {"error": f"Content-Length is {length!r}, expected at most {LARGEST_BODY}"})
        try:
            query, top_k = read_request(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:  # JSON may be nested too deeply
            return self._answer(400, {"error": str(error)})
        return self._answer(200, {"passages": [p._asdict() for p in self.server.index.search(query, top_k)]})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a step may search a thousand times."""


def read_request(body: bytes) -> tuple[str, int]:
    """Read a search: the query, and the number of passages requested.

    Raises:
        ValueError: It is not of the expected form.
    """
    request = json.loads(body)
    query, top_k = (request.get("query"), request.get("top_k", 3)) if isinstance(request, dict) else (None, 0)
    if not isinstance(query, str) or type(top_k) is not int or not 1 <= top_k <= LARGEST_TOP_K:
        raise ValueError(f'got {str(request)[:200]}, expected {{"query": text, "top_k": 1 to {LARGEST_TOP_K}}}')
    return query, top_k


def read_passages(answer: Any) -> list[Passage]:
    """Read what a server answered.

    Raises:
        ValueError: It is not of the expected form.
    """
    try:
        return [Passage(**passage) for passage in answer["passages"]]
    except (TypeError, KeyError) as error:
        raise ValueError(f'answered {str(answer)[:200]}, expected {{"passages": […]}}') from error

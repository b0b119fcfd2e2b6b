"""HTTP servers of tests, each in a thread of this process, and a run for reward models."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import torch

from rlkit.interfaces.runtime import OneProcess


class Stub(BaseHTTPRequestHandler):
    """Reads JSON that is posted, answers, and logs nothing."""

    def read(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def answer(self, body: bytes | object = b"", status: int = 200) -> None:
        """Answer with bytes as they are, and with anything else as JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(server: type[Stub] | ThreadingHTTPServer) -> Iterator[str]:
    """Serve until the block ends; give the address."""
    listener = ThreadingHTTPServer(("127.0.0.1", 0), server) if isinstance(server, type) else server
    thread = threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.server_port}"
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()


def classifier_runtime() -> Any:
    """Return what a reward model needs of a run whose recipe places no rewards."""
    return SimpleNamespace(
        device=torch.device("cpu"), autocast=nullcontext, placed_classifier=OneProcess().placed_classifier
    )

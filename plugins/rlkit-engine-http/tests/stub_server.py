"""A stub of `python -m rlkit_engine_http` that starts in a moment: `python stub_server.py PORT`.

Its model has two vectors, `a` and `b`, whose sum are the logits of every token. It writes the likeliest one again and
again. Its vectors are so short that they are always sent whole. `POST /control` makes it misbehave: see `Stub`.
"""

import array
import json
import math
import os
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Stub(ThreadingHTTPServer):
    """The server; port 0 for a free port."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.weights: dict[str, list[float]] = {}
        self.label = ""
        self.running = threading.Event()
        self.counting = threading.Lock()
        self.asked = 0
        self.holds = 0
        """After how many tokens a completion waits; 0 for none. It goes on once this is changed."""
        self.held = 0
        """Completions that have waited so."""
        self.spoils = ""
        """The name of a tensor that it reads wrongly, once."""
        self.dies = False
        """Whether a request kills it."""
        self.babbles = False
        """Whether it returns invalid completions."""

    def logps(self) -> list[float]:
        logits = [a + b for a, b in zip(self.weights["a"], self.weights["b"], strict=True)]
        log_sum = math.log(sum(math.exp(x) for x in logits))
        return [x - log_sum for x in logits]

    def write(self, count: int) -> dict[str, Any]:
        """Return the most likely token `count` times, each from the current weights."""
        tokens, logps, labels = [], [], []
        for number in range(count):
            if number and number == self.holds:
                with self.counting:
                    self.held += 1
                while number == self.holds:
                    time.sleep(0.005)
            self.running.wait()
            now = self.logps()
            labels.append(self.label)
            logps.append(max(now))
            tokens.append(now.index(max(now)))
        return {"tokens": tokens, "logps": logps, "labels": labels, "stopped": False, "candidates": []}

    def probe(self, row: list[int], count: int) -> dict[str, Any]:
        sampled, now = self.write(count), self.logps()
        sampled["tokens"] = [*row[1:], *sampled["tokens"]]
        sampled["logps"] = [*(now[token] for token in row[1:]), *sampled["logps"]]
        return sampled

    def load(self, file: str) -> None:
        with open(file, "rb") as content:
            data = content.read()
        [size] = struct.unpack("<Q", data[:8])
        for name, spec in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                start, end = (8 + size + offset for offset in spec["data_offsets"])
                self.weights[name] = list(array.array("f", data[start:end]))
                if name == self.spoils:
                    self.weights[name][0] += 3.0
                    self.spoils = ""

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/generate":
            with self.counting:
                self.asked += 1
            if self.dies:
                os._exit(7)
            return {"tokens": "?"} if self.babbles else self.write(body["max_tokens"])
        if path == "/probe":
            return [self.probe(row, body["count"]) for row in body["rows"]]
        if path == "/weights":
            self.load(body["file"])
        if path == "/pause":
            self.running.clear()
        if path == "/continue":
            self.label = body["label"]
            self.running.set()
        if path == "/control":
            vars(self).update(body)
        return {"label": self.label, "asked": self.asked, "held": self.held}


class Handler(BaseHTTPRequestHandler):
    server: Stub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.reply({"label": self.server.label, "asked": self.server.asked})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.reply(self.server.answer(self.path, body))

    def reply(self, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


if __name__ == "__main__":
    if sys.argv[1] == "broken":
        sys.exit("there is no room for the model")
    Stub(int(sys.argv[1])).serve_forever()

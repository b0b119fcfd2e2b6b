"""A headless Chromium, driven by its own protocol over a pipe: no port, no further package."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe",
           "--disable-background-networking", "--hide-scrollbars")  # fmt: skip


class Navigated(Exception):
    """The page was left, or read again, while an expression was evaluated."""


class Tab:
    """A page: evaluates JavaScript in it, and keeps what its console and its log were given."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._left, self._last = to, back, b"", 0
        self.console: list[str] = []
        self.requests: list[str] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result of a command of the protocol."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._last:
                if "navigated" in answer.get("error", {}).get("message", ""):
                    raise Navigated
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self, timeout: float = 60) -> dict[str, Any]:
        while b"\0" not in self._left:
            assert select.select([self._back], [], [], timeout)[0], "the browser does not answer"
            piece = os.read(self._back, 1 << 20)
            assert piece, "the browser has ended"
            self._left += piece
        line, self._left = self._left.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        params = message.get("params", {})
        if message.get("method") == "Runtime.consoleAPICalled":
            self.console.append(str([a.get("value", a.get("description")) for a in params["args"]]))
        elif message.get("method") == "Runtime.exceptionThrown":
            self.console.append(str(params["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded":
            self.console.append(params["entry"]["text"])
        elif message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        return message

    def open(self, place: Path | str, address: str = "") -> float:
        """Open a report, a file or one that is served; return the seconds until it is drawn."""
        url = place if isinstance(place, str) else place.resolve().as_uri()
        self.call("Page.navigate", url="about:blank")
        start = time.monotonic()
        self.call("Page.navigate", url=f"{url}{address}")
        while not self.run("document.body !== null && document.body.dataset.ready === 'true'"):
            assert time.monotonic() - start < 60, self.console
            time.sleep(0.02)
        return time.monotonic() - start

    def run(self, script: str) -> Any:
        """Return the value of an expression, awaited if it is a promise."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + 30
        while not self._run_now(script):
            assert time.monotonic() < end, f"never true: {script}; console: {self.console}"
            time.sleep(0.02)

    def _run_now(self, script: str) -> Any:
        try:
            return self.run(script)
        except Navigated:
            return None

    def resize(self, width: int, height: int, dark: bool = False) -> None:
        """Set the size of the view, and its theme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])


@contextmanager
def chromium(folder: Path) -> Iterator[Tab]:
    """Start a browser whose profile is in a folder, and open a page.

    Where there is none, the test is skipped; it fails where `RLKIT_REQUIRE_BROWSER` is set.
    """
    program = next((found for found in map(shutil.which, NAMES) if found), None)
    if program is None:
        refuse = pytest.fail if os.environ.get("RLKIT_REQUIRE_BROWSER") else pytest.skip
        refuse(f"this test needs a browser, one of {', '.join(NAMES)}: apt-get install chromium")
    (theirs_in, to), (back, theirs_out) = os.pipe(), os.pipe()
    # the browser reads commands from descriptor 3 and writes to 4
    line = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
    words = ("bash", "-c", line, program, *OPTIONS, f"--user-data-dir={folder}")
    process = subprocess.Popen(words, pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL)
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Tab(to, back)
    finally:
        process.terminate()
        process.wait(30)
        os.close(to)
        os.close(back)

"""A server at a url that does not answer: what is waited for, and why, is said at once."""

from __future__ import annotations

import asyncio
import threading
import warnings
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from rlkit_servers import server as server_module
from rlkit_servers.http import Client, Fault
from rlkit_servers.retry import ServerRetryPolicy
from rlkit_servers.server import InferenceServer
from rlkit_servers.states import ServerState
from rlkit_servers.update import release

from rlkit.base.errors import EngineError

REFUSED = "GET http://nowhere:1/health failed with ClientConnectorError: Connect call failed"
LOADING = "GET http://nowhere:1/health answered 503: loading"


class Api:
    """A server whose health checks fail with these texts, and then succeed."""

    product = "SGLang"

    def __init__(self, *problems: str) -> None:
        self.client = Client("http://nowhere:1")
        self.problems = list(problems)

    async def health(self, deadline: float) -> None:
        if self.problems:
            raise Fault(self.problems.pop(0))

    async def inspect(self, started: bool) -> None: ...

    def release(self, deadline: float) -> None:
        raise Fault("POST http://nowhere:1/release_memory_occupation answered 500")


def wait(api: Any, process: Any = None, seconds: float = 600.0) -> list[str]:
    """Wait for a server; return what is said meanwhile."""
    server = InferenceServer(api, ServerRetryPolicy(start_seconds=seconds), process)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        asyncio.run(server.wait_ready())
    return [str(warning.message) for warning in said]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(server_module, "NOTICE_SECONDS", 0.0)


def test_a_wait_for_a_url_says_each_reason_once() -> None:
    said = wait(Api(REFUSED, REFUSED, REFUSED, LOADING, LOADING))
    assert said == [
        f"waiting up to 600 s for the SGLang server http://nowhere:1, which rlkit does not start: {reason}; start it, "
        "or correct its url"
        for reason in (REFUSED, LOADING)
    ]


def test_a_server_that_starts_is_waited_for_in_silence() -> None:
    class Process:
        alive = True

    assert wait(Api(REFUSED, REFUSED), Process()) == []


def test_the_end_of_a_wait_names_the_last_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "time", SimpleNamespace(monotonic=count().__next__))
    with pytest.raises(EngineError, match=f"could not be reached: there was no healthy .* the last try: {LOADING}"):
        wait(Api(REFUSED, LOADING, LOADING), seconds=2.0)


def test_a_wrong_url_is_said_within_seconds() -> None:
    class Wrong(Api):
        async def health(self, deadline: float) -> None:
            try:
                await self.client.get("/health", deadline)
            finally:
                await self.client.finish()

    api = Wrong()
    api.client = Client("http://127.0.0.1:9")  # the port of `discard`
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9 could not be reached: .*Connect call failed"):
        wait(api, seconds=0.001)


class Hosted:
    """A process whose machine is gone; started again, it runs on another one."""

    url, log, alive = "http://elsewhere:2", "server.log", False

    def __init__(self, lost: bool) -> None:
        self.lost = lost

    def is_lost(self) -> bool:
        return self.lost

    def start(self) -> None:
        self.alive = True

    def tail(self) -> str:
        assert threading.current_thread() is not threading.main_thread(), "it holds up the servers that live"
        return "out of memory"


def test_a_server_whose_machine_dies_in_its_start_is_moved() -> None:
    api = Api(REFUSED, REFUSED)
    assert wait(api, Hosted(lost=True)) == []
    assert api.client.url == "http://elsewhere:2"
    with pytest.raises(EngineError, match=r"(?s)could not start: its process ended.*out of memory"):
        wait(Api(REFUSED), Hosted(lost=False))


def test_a_server_is_marked_broken_without_its_log() -> None:
    """Its machine may be dead, and then the log takes long."""
    server = InferenceServer(Api(), ServerRetryPolicy(restarts=0), Hosted(lost=True))
    error = server.mark_broken("answer", Fault("Server disconnected"))
    assert str(error) == "SGLang server http://nowhere:1 could not answer: Server disconnected"
    with pytest.raises(EngineError, match=r"(?s)could not go on: it failed 1 times .*answer: .*out of memory"):
        asyncio.run(server.restart())


def test_a_release_that_fails_has_the_end_of_the_log() -> None:
    """It ends the run, so that nobody reads the log later."""
    server = InferenceServer(Api(), ServerRetryPolicy(), Hosted(lost=False))
    server.state = ServerState.READY
    with pytest.raises(EngineError, match=r"(?s)could not release memory: .*answered 500.*out of memory"):
        release(server)
    assert server.state is ServerState.BROKEN

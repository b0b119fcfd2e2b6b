"""McpTool against a real server, over its standard input and output and over HTTP, which errs, dawdles and dies."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rlkit_tool_mcp
from rlkit_tool_mcp import McpTool, ToolError, session
from rlkit_tool_mcp.session import Server
from rlkit_tool_mcp.tool import as_text

from rlkit.base.errors import RecipeError
from rlkit.registry import load_plugins
from rlkit.rollout.participants import Participants

SCRIPT = str(Path(__file__).with_name("calculator.py"))
ENV = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
STDIO: dict[str, Any] = {"command": [sys.executable, SCRIPT], "env": ENV}


def bound(tool: str, **options: Any) -> McpTool:
    made = McpTool(tool, **{"timeout": 300.0, "start_timeout": 300.0, **options})
    made.bind(None)  # type: ignore[arg-type]
    return made


@contextmanager
def tools(*names: str, **options: Any) -> Iterator[list[McpTool]]:
    """Bind tools of one server, and close them at the end."""
    made = [bound(name, **options) for name in names]
    try:
        yield made
    finally:
        for tool in made:
            tool.close()


def run(*calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """Make calls at once, in an event loop of their own; give answers and errors."""

    async def together() -> list[Any]:
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(together())


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# --- over standard input and output


@pytest.fixture(scope="module", autouse=True)
def kept() -> Iterator[None]:
    """Keep one session open, which tests with the same command share: a server takes a second to start."""
    with tools("add", **STDIO):
        yield


def test_a_tool_is_described_as_the_server_describes_it() -> None:
    with tools("add", **STDIO) as [add]:
        assert (add.name, add.description) == ("add", "Adds two whole numbers.")
        assert add.parameters["type"] == "object"
        assert add.parameters["required"] == ["a", "b"]
        assert run(add.call({"a": 2, "b": 3}, {})) == ["5"]
        assert run(add.call({"a": -2, "b": 3}, {})) == ["1"]  # of another event loop


def test_the_policy_may_call_it_by_another_name() -> None:
    """As in the README, where `weather` is the server's `forecast`: a recipe's name is given before or after `bind`."""
    early = McpTool("add", timeout=300.0, start_timeout=300.0, **STDIO)
    with tools("add", **STDIO) as [late]:
        Participants({"total": late, "sum": early})
        assert (late.name, early.name) == ("total", "sum")
        early.bind(None)  # type: ignore[arg-type]
        try:
            assert run(early.call({"a": 2, "b": 3}, {}), late.call({"a": 2, "b": 4}, {})) == ["5", "6"]
        finally:
            early.close()


def test_an_error_is_the_servers_own() -> None:
    with tools("divide", "add", **STDIO) as [divide, add]:
        [error, wrong, quotient] = run(
            divide.call({"a": 1, "b": 0}, {}), add.call({"a": "x"}, {}), divide.call({"a": 1, "b": 2}, {})
        )
        assert isinstance(error, ToolError)
        assert "no number divides by 0" in str(error)
        assert isinstance(wrong, ToolError)
        assert "valid integer" in str(wrong)
        assert quotient == "0.5"


def test_a_slow_call_is_cut_and_holds_up_nobody() -> None:
    async def overtake() -> None:
        slow = asyncio.create_task(sleep.call({"seconds": 600}, {}))  # type: ignore[arg-type]
        assert await add.call({"a": 1, "b": 1}, {}) == "2"
        assert not slow.done()
        slow.cancel()

    with tools("sleep", "add", **STDIO) as [sleep, add], tools("sleep", **STDIO, timeout=0.5) as [hasty]:
        asyncio.run(overtake())
        [late] = run(hasty.call({"seconds": 600}, {}))
        assert isinstance(late, TimeoutError)
        assert str(late).endswith("gave no answer to sleep within 0.45 s")


def test_a_caller_may_give_up() -> None:
    async def give_up() -> str:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sleep.call({"seconds": 600}, {}), 0.1)
        return await add.call({"a": 1, "b": 1}, {})  # type: ignore[return-value]

    with tools("sleep", "add", **STDIO) as [sleep, add]:
        assert asyncio.run(give_up()) == "2"


def test_many_calls_share_a_connection() -> None:
    with tools("add", **STDIO) as [add]:
        assert run(*(add.call({"a": i, "b": i}, {}) for i in range(200))) == [str(2 * i) for i in range(200)]


def test_a_server_that_was_killed_is_started_again() -> None:
    with tools("process", "add", **STDIO) as [process, add]:
        pid = int(run(process.call({}, {}))[0].split()[0])
        os.kill(pid, signal.SIGKILL)
        # both calls find the connection lost, and one new server answers both
        [answer, first] = run(add.call({"a": 1, "b": 1}, {}), process.call({}, {}))
        assert answer == "2"
        assert int(first.split()[0]) != pid
        assert run(process.call({}, {})) == [first]


@pytest.mark.slow
def test_a_call_that_kills_the_server_each_time_is_given_up() -> None:
    with tools("crash", "add", **STDIO, retries=1) as [crash, add]:
        [error] = run(crash.call({}, {}))
        assert isinstance(error, ConnectionError)
        assert str(error).endswith("was lost during crash, 2 times: Connection closed")
        assert run(add.call({"a": 1, "b": 1}, {})) == ["2"]


def test_a_session_is_shared_and_closed_with_its_last_tool() -> None:
    vanilla = {"command": STDIO["command"], "env": {**ENV, "FLAVOUR": "vanilla"}}
    with tools("process", **STDIO) as [plain], tools("process", "process", **vanilla) as [one, other]:
        answers = run(plain.call({}, {}), one.call({}, {}), other.call({}, {}))
        assert answers[0].endswith(" -")
        assert answers[1].endswith(" vanilla")
        assert answers[1] == answers[2] != answers[0]
        other.close()
        assert run(one.call({}, {})) == [answers[1]]
    assert not alive(int(answers[1].split()[0]))
    assert alive(int(answers[0].split()[0]))  # the fixture still holds it
    with pytest.raises(RuntimeError, match="'process' was called before `bind` or after `close`"):
        asyncio.run(one.call({}, {}))


def test_a_close_ends_calls_that_are_under_way() -> None:
    async def close_while_it_sleeps() -> None:
        call = asyncio.create_task(sleep.call({"seconds": 600}, {}))
        assert await add.call({"a": 1, "b": 1}, {}) == "2"  # the server has read what came before
        for tool in (sleep, add):
            tool.close()
        with pytest.raises((ConnectionError, asyncio.CancelledError)):
            await call

    other = {"command": STDIO["command"], "env": {**ENV, "FLAVOUR": "closing"}}
    with tools("sleep", "add", **other) as [sleep, add]:
        asyncio.run(close_while_it_sleeps())


# --- what a recipe gets wrong


def test_an_unknown_server_tool_is_named_with_the_known() -> None:
    with pytest.raises(
        RecipeError, match=r"no tool 'ad', it has: add, divide, sleep, process, crash; did you mean add"
    ):
        bound("ad", **STDIO)


@pytest.mark.parametrize(
    ("command", "seconds", "message"),
    [
        (["/nowhere/server"], 300.0, "cannot connect to /nowhere/server: FileNotFoundError"),
        ([sys.executable, "-c", ""], 300.0, "Connection closed; start the server by hand"),
        ([sys.executable, "-c", "import time; time.sleep(600)"], 1.0, "TimeoutError"),
    ],
)
def test_a_server_that_does_not_start_is_named(command: list[str], seconds: float, message: str) -> None:
    with pytest.raises(RecipeError, match=f"McpTool 'add': .*{message}"):
        bound("add", command=command, start_timeout=seconds)
    assert len(session._shared) == 1  # the fixture's alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "command=None, env=None and url=None, expected a command"),
        ({"command": []}, "expected a command"),
        ({"command": ["x"], "url": "http://h"}, "expected a command"),
        ({"url": "http://h", "env": {"A": "b"}}, "expected a command"),
        ({"url": "localhost"}, "expected http://"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        McpTool("add", **options)


def test_what_is_not_text_is_named() -> None:
    blocks = [
        SimpleNamespace(type="text", text="hello"),
        SimpleNamespace(type="image", data="…"),
        SimpleNamespace(type="resource", resource=SimpleNamespace(text="a file")),
        SimpleNamespace(type="resource", resource=SimpleNamespace(blob="…")),
    ]
    assert [as_text(block) for block in blocks] == ["hello", "[image]", "a file", "[resource]"]


def test_it_registers() -> None:
    registry = load_plugins([("tool-mcp", rlkit_tool_mcp)], entry_points=False)
    registry.require_healthy()
    assert registry.parts["tools"]["McpTool"].cls is McpTool


# --- over HTTP


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def listening(port: int) -> Iterator[int]:
    """Run a server process that listens at the port, and kill it at the end; give its id."""
    command = (sys.executable, SCRIPT, str(port))
    process = subprocess.Popen(command, env={**os.environ, **ENV}, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield process.pid
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_over_http_a_server_may_be_restarted_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    from mcp import Client

    port = free_port()
    url = f"http://127.0.0.1:{port}/mcp"
    with ExitStack() as stack:
        with listening(port) as pid:
            [add, divide, tell] = stack.enter_context(tools("add", "divide", "process", url=url))
            with monkeypatch.context() as patch:  # a session that the server must remember, as older protocols have
                patch.setattr(Server, "client", lambda self: Client(self.url, mode="legacy"))
                [held] = stack.enter_context(tools("process", url=url + "?session"))
            assert run(add.call({"a": 1, "b": 1}, {})) == ["2"]
            [error, *answers] = run(divide.call({"a": 1, "b": 0}, {}), tell.call({}, {}), held.call({}, {}))
            assert isinstance(error, ToolError)
            assert answers == [f"{pid} -"] * 2
        with listening(port) as pid:
            assert run(tell.call({}, {}), held.call({}, {})) == [f"{pid} -"] * 2
        tell.retries = 1
        [error] = run(tell.call({}, {}))
        assert isinstance(error, ConnectionError)
        assert "was lost during process, 2 times: cannot connect to http://127.0.0.1" in str(error)
    with pytest.raises(RecipeError, match=r"McpTool 'add': cannot connect to .*ConnectError"):
        bound("add", url=url)

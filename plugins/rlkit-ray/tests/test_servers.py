"""Where a hosted server is started and when it is moved, on nodes that die when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayError, RayTaskError
from rlkit_ray import servers
from rlkit_ray.servers import RESERVED, RayServer

from rlkit.base.errors import EngineError
from rlkit.interfaces.launcher import ServerCommand, ServerSite

COMMAND = ServerCommand("fake", lambda site: ["serve", str(site.port)], lambda folder: None)
DEAD = ActorUnavailableError("its node does not answer", None)


class Node:
    """An actor on its node.

    Args:
        port: The port that it offers.
        fault: The call in which the node fails, and the error; None for a node that works.
    """

    def __init__(self, port: int, fault: tuple[str, RayError] | None) -> None:
        self.port = port
        self.fault = fault
        self.runs = False
        self.calls: list[str] = []

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: (self, method))

    def call(self, method: str) -> Any:
        self.calls.append(method)
        if self.fault is not None and method == self.fault[0]:
            raise self.fault[1]
        if method == "start":
            self.runs = True
        return {"site": ServerSite(Path("folder"), "host", self.port), "running": self.runs}.get(method)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Node]]:
    """Return a function that makes Ray place actors on nodes with the given faults, one after another."""
    placed: list[Node] = []

    def use(*faults: tuple[str, RayError] | None) -> list[Node]:
        nodes = iter([Node(port, fault) for port, fault in enumerate(faults)])

        def place() -> Node:
            placed.append(next(nodes))
            return placed[-1]

        actor = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=place))
        fake = SimpleNamespace(
            remote=lambda cls: actor,
            get=lambda call, timeout: call[0].call(call[1]),
            kill=lambda node: None,
            util=SimpleNamespace(get_placement_group=lambda name: name),
        )
        monkeypatch.setattr(servers, "ray", fake)
        return placed

    monkeypatch.setenv(RESERVED, "group")
    monkeypatch.setattr(servers, "connect", lambda: None)
    monkeypatch.setattr(servers, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(servers.RayServer, "_watch", lambda self, actor: None)
    return use


def server(wait_seconds: float = 60.0) -> RayServer:
    return RayServer(COMMAND, 0, {"CPU": 1.0}, wait_seconds)


def test_a_server_is_started_where_no_node_dies(cluster: Callable[..., list[Node]]) -> None:
    """One node dies before its actor is there, one as it says where it is, one as it starts the server."""
    placed = cluster(("site", ActorDiedError()), ("site", DEAD), ("start", ActorDiedError()), None)
    hosted = server()
    hosted.start()
    assert (len(placed), hosted.url, hosted.alive, hosted.is_lost()) == (4, "http://host:3", True, False)


@pytest.mark.parametrize("dies", [False, True])
def test_a_server_is_restarted_where_it_was_unless_its_node_died(
    cluster: Callable[..., list[Node]], dies: bool
) -> None:
    placed = cluster(None, None)
    hosted = server()
    hosted.start()
    [node] = placed
    hosted._alive = node.runs = False  # as the watch notes it
    if dies:
        node.fault = ("running", DEAD)
    assert hosted.is_lost() == dies
    hosted.start()
    assert [len(placed), hosted.url, hosted.alive] == (
        [2, "http://host:1", True] if dies else [1, "http://host:0", True]
    )


@pytest.mark.parametrize("method", ["site", "start"])
def test_an_error_of_the_actors_own_code_ends_at_once(cluster: Callable[..., list[Node]], method: str) -> None:
    error = RayTaskError("start", "OSError: no space left", OSError())
    placed = cluster((method, error if method == "start" else ActorDiedError(error)), None)
    with pytest.raises(EngineError, match="server fake could not be started on the Ray cluster: .*no space left"):
        server().start()
    assert len(placed) == 1


@pytest.mark.parametrize(
    ("error", "reason"), [(GetTimeoutError("late"), "no node has room for it"), (DEAD, "its node does not answer")]
)
def test_a_wait_ends_with_its_reason(cluster: Callable[..., list[Node]], error: RayError, reason: str) -> None:
    placed = cluster(("site", error), None)
    with pytest.raises(EngineError, match=rf"within 0 s \(launcher\.wait_seconds\): .*{reason}.*; see `ray status`"):
        server(wait_seconds=0.0).start()
    assert len(placed) == 1


def test_a_closed_server_is_not_tried_again(cluster: Callable[..., list[Node]]) -> None:
    placed = cluster(("site", DEAD), None)
    hosted = server()
    hosted.close()
    with pytest.raises(EngineError, match="could not be started"):
        hosted.start()
    assert len(placed) == 1

"""Where a hosted server is started and when it is moved, on nodes that die when a test says so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayError, RayTaskError
from rlkit_ray import servers
from rlkit_ray.driver import divides_rows
from rlkit_ray.servers import RESERVED, RayServer, ServerActor

from rlkit.base.errors import EngineError
from rlkit.interfaces.launcher import LaunchedRun, ServerCommand, ServerSite

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
        self.status: int | None = None
        self.calls: list[str] = []

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: (self, method))

    def call(self, method: str) -> Any:
        self.calls.append(method)
        if self.fault is not None and method == self.fault[0]:
            raise self.fault[1]
        if method == "start":
            self.runs = True
        site = ServerSite(Path("folder"), "host", self.port)
        return {"site": site, "running": self.runs, "exit_status": self.status}.get(method)


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


@pytest.mark.parametrize(
    ("vital", "status", "noted"),
    [(True, -9, {4: -9}), (True, None, {4: None}), (True, 2, {}), (True, 0, {}), (False, -9, {})],
)
def test_the_first_nodes_agent_knows_what_ended_a_vital_server(
    cluster: Callable[..., list[Node]], monkeypatch: pytest.MonkeyPatch, vital: bool, status: int | None, noted: object
) -> None:
    """A signal, or its node's death; one that has ended by its own error would do so again."""
    placed = cluster(None)
    told: dict[int, int | None] = {}
    agent = SimpleNamespace(note_lost_server=SimpleNamespace(remote=lambda *arguments: (Told(), arguments)))
    monkeypatch.setattr(servers.ray, "get_actor", {"group": agent}.__getitem__, raising=False)

    class Told:
        def call(self, arguments: tuple[int, int | None]) -> None:
            assert hosted.alive  # the run does not know it yet
            told.update([arguments])

    command = ServerCommand("fake", COMMAND.words, COMMAND.write_files, vital=vital)
    hosted = RayServer(command, 4, {"CPU": 1.0}, 60.0)
    hosted.start()
    placed[0].status = status
    hosted._note_end(with_its_node=status is None)
    assert (hosted.alive, hosted.exit_status(), told) == (False, status, noted)


def test_a_log_is_written_where_the_node_shares_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.1")
    actor = ServerActor()
    with pytest.raises(FileNotFoundError, match=rf"node 10\.0\.0\.1 does not share the folder {tmp_path}/missing"):
        actor.start(["true"], {}, {}, tmp_path / "missing" / "log")
    actor.start([sys.executable, "-c", "print('begun')"], {}, {}, tmp_path / "log")
    assert actor.supervisor is not None
    assert actor.supervisor.wait(60) == 0
    assert (tmp_path / "log").read_text().startswith("begun\n")
    assert (actor.running(), actor.exit_status()) == (False, 0)
    actor.close()


@pytest.mark.parametrize(("nodes", "fits"), [(4, True), (3, False), (2, True), (1, True)])
def test_a_run_goes_on_with_ranks_that_can_divide_the_rows_of_its_pools(nodes: int, fits: bool) -> None:
    run = LaunchedRun((), Path("/run"), None, False, 4, 2, False, pools=((0, 0, 0, 0), (0,)))
    assert divides_rows(run, nodes) == fits

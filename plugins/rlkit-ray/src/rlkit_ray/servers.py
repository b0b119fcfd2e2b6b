"""Servers and processes of pools on the cluster's nodes: an actor for each, which starts, watches and kills it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from rlkit_servers.process import SupervisedProcess, free_port, server_environment

from rlkit.base.errors import EngineError, explain
from rlkit.interfaces.launcher import HostedServer, ServerCommand, ServerSite

CLUSTER = "RLKIT_RAY_CLUSTER"
"""The environment variable of ranks with the address of the cluster."""

RESERVED = "RLKIT_RAY_SERVERS"
"""The environment variable of ranks with the name of the placement group, and of the agent of the first node.

The bundles of the group are those of pools, of rollout servers and of nodes, in this order.
"""

NAMESPACE = "rlkit"
POLL_SECONDS = 1.0
RETRY_SECONDS = 2.0
"""Between two tries to start a server whose node has died; Ray moves its bundle once it has noticed."""
REPLY_SECONDS = 30.0
"""A server's actor that does not answer for as long is lost, with its node."""

Files = Mapping[str, bytes]
"""The contents of files, by their paths in a folder."""


def connect() -> None:
    """Connect this rank to the cluster that it runs on."""
    if ray.is_initialized():
        return
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(os.environ[CLUSTER], namespace=NAMESPACE, log_to_driver=False, logging_level="error")
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray has set its own


class ServerActor(SupervisedProcess):
    """Runs one server on its node; the server ends when the actor does."""

    def __init__(self) -> None:
        super().__init__("server")

    def site(self) -> ServerSite:
        """Return the placement of the server; Ray shows this actor only its own GPUs."""
        host = ray.util.get_node_ip_address()
        on_gpus = bool(os.environ.get("CUDA_VISIBLE_DEVICES"))
        return ServerSite(self.folder, host, free_port(host), sys.executable, 0 if on_gpus else None)

    def start(self, words: Sequence[str], environment: Mapping[str, str], files: Files, log: Path | None) -> None:
        """Start or restart the server.

        Args:
            words: The command line.
            environment: Environment variables beside those of the node.
            files: What the command reads in its folder.
            log: The file of its output, on a file system that the node shares; None for one in its folder.

        Raises:
            FileNotFoundError: The node does not share the folder of the log.
        """
        if log is not None:
            if not os.path.isdir(log.parent):
                raise FileNotFoundError(f"node {ray.util.get_node_ip_address()} does not share the folder {log.parent}")
            self.log_file = log
        for name, content in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        self.run(words, {**server_environment(), **environment})


def _is_of_our_code(error: RayError) -> bool:
    """Check whether the actor's own code has raised an error, which would be raised again."""
    return isinstance(error, RayTaskError) or (isinstance(error, RayActorError) and error.actor_init_failed)


class RayServer(HostedServer):
    """A server in a reserved bundle, which Ray moves to another node when its own dies.

    Args:
        command: How the server is started.
        bundle: The index of its bundle in the placement group.
        resources: What the bundle has.
        wait_seconds: How long to wait for a node.
    """

    def __init__(
        self, command: ServerCommand, bundle: int, resources: Mapping[str, float], wait_seconds: float
    ) -> None:
        self._command = command
        self._bundle = bundle
        self._resources = resources
        self._wait_seconds = wait_seconds
        self._actor: Any = None
        self._alive = False
        self._exit_status: int | None = None
        self._closed = threading.Event()
        with tempfile.TemporaryDirectory() as folder:
            command.write_files(Path(folder))
            paths = [path for path in Path(folder).rglob("*") if os.path.isfile(path)]
            self._files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}

    def start(self) -> None:
        """Start or restart the server; a node that dies meanwhile is tried again, until Ray moves the bundle.

        Raises:
            EngineError: There is no node in time, or what starts the server fails on its node.
        """
        deadline = time.monotonic() + self._wait_seconds
        while not self._alive:
            try:
                if self._actor is None or self._status() is None:
                    self._place(deadline - time.monotonic())
                self._call("start", self._words, self._command.environment, self._files, self._command.log)
                self._alive = True
            except (RayError, GetTimeoutError) as error:
                self._lose()
                too_late = time.monotonic() + RETRY_SECONDS > deadline
                if too_late or _is_of_our_code(error) or self._closed.wait(RETRY_SECONDS):
                    raise EngineError(self._explain(error)) from error

    def _explain(self, error: RayError) -> str:
        subject = f"server {self._command.product} could not be started on the Ray cluster"
        if _is_of_our_code(error):
            return f"{subject}: {explain(error)}"
        reason = "no node has room for it" if isinstance(error, GetTimeoutError) else explain(error)
        return f"{subject} within {self._wait_seconds:g} s (launcher.wait_seconds): {reason}; see `ray status`"

    def _place(self, seconds: float) -> None:
        """Create the actor, on the node that has the bundle now.

        Args:
            seconds: How long to wait for a node.

        Raises:
            RayError: There is no such node in time, or it dies.
        """
        self._lose()
        connect()
        group = ray.util.get_placement_group(os.environ[RESERVED])
        self._actor = (
            ray.remote(ServerActor)
            .options(
                num_cpus=self._resources["CPU"],
                num_gpus=self._resources.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, self._bundle),
            )
            .remote()
        )
        site: ServerSite = ray.get(self._actor.site.remote(), timeout=max(seconds, 0))
        self.url = f"http://{site.host}:{site.port}"
        self.log = str(self._command.log or f"{site.folder}/server.log on {site.host}")
        self._words = list(self._command.words(site))
        watch = threading.Thread(target=self._watch, args=(self._actor,), daemon=True, name="rlkit-ray-server")
        watch.start()

    def _watch(self, actor: Any) -> None:
        """Note when the server has ended, as long as this actor runs it."""
        while actor is self._actor and not self._closed.wait(POLL_SECONDS):
            running = self._status() if self._alive else True
            if not running:
                self._note_end(with_its_node=running is None)

    def _note_end(self, with_its_node: bool) -> None:
        """Note how the server ended; of a vital one, the agent of the first node is told before the run ends by it."""
        try:
            self._exit_status = None if with_its_node else self._call("exit_status")
            by_itself = self._exit_status is not None and self._exit_status >= 0
            if self._command.vital and not by_itself and not self._closed.is_set():
                agent = ray.get_actor(os.environ[RESERVED])
                noted = agent.note_lost_server.remote(self._bundle, self._exit_status)
                ray.get(noted, timeout=REPLY_SECONDS)
        except (RayError, GetTimeoutError, ValueError):  # a ValueError: the agent is gone
            pass
        finally:
            self._alive = False

    def _status(self) -> bool | None:
        """Check whether the server runs; None if its actor does not answer."""
        try:
            return bool(self._call("running"))
        except (RayError, GetTimeoutError):
            return None

    @property
    def alive(self) -> bool:
        return self._alive

    def exit_status(self) -> int | None:
        return self._exit_status

    def is_lost(self) -> bool:
        return self._actor is None or self._status() is None

    def tail(self) -> str:
        try:
            return str(self._call("tail")) if self._actor is not None else ""
        except (RayError, GetTimeoutError):
            return "(its node does not answer)"

    def close(self) -> None:
        self._closed.set()
        if self._actor is not None:
            with contextlib.suppress(RayError, GetTimeoutError):
                self._call("close")
            self._lose()

    def _lose(self) -> None:
        """Kill the actor, if there is one."""
        self._alive = False
        actor, self._actor = self._actor, None
        if actor is not None:
            ray.kill(actor)

    def _call(self, method: str, *arguments: object) -> Any:
        return ray.get(getattr(self._actor, method).remote(*arguments), timeout=REPLY_SECONDS)

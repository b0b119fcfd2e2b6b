"""The launcher: it reserves nodes, starts an agent on each, and goes on after a node has died."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any

import ray

from rlkit.base.errors import INTERRUPTED, LaunchError, explain, show
from rlkit.base.names import USER_ONLY
from rlkit.base.ranges import Count, NonNegativeInt, PositiveFloat
from rlkit.interfaces.launcher import HostedServer, LaunchedRun, Launcher, ServerCommand
from rlkit_ray.attempt import Attempt
from rlkit_ray.cluster import Demand, capacity, require_capacity, reserve, server_resources
from rlkit_ray.servers import NAMESPACE, RayServer

DEATH_SECONDS = 60.0
"""How long Ray may take to notice that a node has died whose agent no longer answers."""

CONNECT_SECONDS = 10.0
"""How long a cluster's address may take to answer."""

INIT_SECONDS = 60.0
"""How long a cluster may take to connect this process, or one of this machine to start."""

PASSED_ON = ("HF_", "NCCL_", "OMP_", "PYTHONPATH", "RLKIT_", "TORCH_", "WANDB_")
"""Beginnings of the environment variables of the command that ranks get too."""


class Ray(Launcher):
    """Starts the ranks on the nodes of a Ray cluster, and goes on with the nodes that are left when one dies.

    Rollout servers that the run starts (SGLangServer, HttpEngine) get devices of their own on any node. If their node
    dies, they are started on another one and get the weights again, while the run goes on.

    The nodes need rlkit and this package, and the file systems of the current folder and of the run folder, where each
    rank's output is in `launcher/`. The command shows that of rank 0; Ctrl-C ends the run as without a launcher. When
    the command ends in whatever way, all processes of the run end.

    Args:
        address: The cluster: `auto` for that of this machine or of `RAY_ADDRESS`, `host:port`, `ray://host:port`, or
            `local` for a new one of this machine alone. No recipe file may set it.
        cpus_per_rank: CPUs of each rank; on CPUs, also its threads.
        cpus_per_server: CPUs of each rollout server that the run starts.
        restarts: How often the run goes on from its newest checkpoint after a node has died, or a rank was killed.
        wait_seconds: Seconds to wait for devices that others use.
        grace_seconds: Seconds in which the other ranks end by themselves once one has failed.
    """

    def __init__(
        self,
        *,
        address: Annotated[str, USER_ONLY] = "auto",
        cpus_per_rank: Count = 1,
        cpus_per_server: Count = 1,
        restarts: NonNegativeInt = 3,
        wait_seconds: PositiveFloat = 600.0,
        grace_seconds: PositiveFloat = 60.0,
    ) -> None:
        self.address = address
        self.cpus_per_rank = cpus_per_rank
        self.cpus_per_server = cpus_per_server
        self.restarts = restarts
        self.wait_seconds = wait_seconds
        self.grace_seconds = grace_seconds
        self._hosted = 0

    def launch(self, run: LaunchedRun) -> int:
        self._connect()
        try:
            with counted_signals() as signals:
                return self._run(run, signals)
        finally:
            ray.shutdown()

    def host_server(self, command: ServerCommand) -> HostedServer:
        resources = server_resources(command.gpus, self.cpus_per_server)
        self._hosted += 1
        return RayServer(command, self._hosted - 1, resources, self.wait_seconds)

    def _connect(self) -> None:
        """Connect to the cluster, or start one of this machine.

        Raises:
            LaunchError: It cannot be reached.
        """
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "namespace": NAMESPACE}
        if self.address == "local":
            options["include_dashboard"] = False
        try:
            _require_listener(os.environ.get("RAY_ADDRESS", "auto") if self.address == "auto" else self.address)
            _init(self.address, options)
        except Exception as error:  # Ray raises errors of many kinds
            raise LaunchError(
                f"launcher.address is {show(self.address)}, where no Ray cluster answers: {explain(error)}; start one "
                "with `ray start --head`, or set --launcher.address=local"
            ) from error

    def _run(self, run: LaunchedRun, signals: list[int]) -> int:
        """Start the run, and again after each death of a node; return the exit status."""
        demand = Demand.of(run, self.cpus_per_rank, self.cpus_per_server)
        require_capacity(demand)
        nodes, lost = run.nodes, set[str]()
        for attempt in range(self.restarts + 1):
            if attempt:
                nodes = self._nodes_left(demand, lost, signals)
                print(f"launcher: going on with {nodes} of {run.nodes} nodes ({attempt} of {self.restarts} restarts)")
            reservation = None if signals else reserve(replace(demand, nodes=nodes), self.wait_seconds, signals)
            if reservation is None:
                return INTERRUPTED
            attempted = Attempt(replace(run, nodes=nodes), reservation, demand.node, self.grace_seconds)
            try:
                attempted.start(self._variables(), restarted=attempt > 0)
                end = attempted.watch(signals)
            finally:
                attempted.stop()
            lost |= end.lost_nodes
            if not end.may_go_on or signals:
                return end.status
            print(f"launcher: {end.reason}")
        raise LaunchError(f"{end.reason}, after {self.restarts} restarts (launcher.restarts); logs: {run.out}/launcher")

    def _nodes_left(self, demand: Demand, lost: set[str], signals: list[int]) -> int:
        """Return on how many nodes the run can go on, once Ray has noticed which have died.

        Raises:
            LaunchError: There is no room for any.
        """
        deadline = time.monotonic() + DEATH_SECONDS
        while lost & {node["NodeID"] for node in ray.nodes() if node["Alive"]} and time.monotonic() < deadline:
            time.sleep(1.0)
        deadline = time.monotonic() + self.wait_seconds
        while not signals:
            for nodes in range(demand.nodes, 0, -1):
                if capacity(replace(demand, nodes=nodes)) == (len(demand.servers), nodes):
                    return nodes
            if time.monotonic() > deadline:
                raise LaunchError(f"the Ray cluster had no room for the run for {self.wait_seconds:g} s; add nodes")
            time.sleep(1.0)
        return 0

    def _variables(self) -> dict[str, str]:
        """Return the environment variables that ranks get from the command."""
        own = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
        return {"OMP_NUM_THREADS": str(self.cpus_per_rank), "PYTHONUNBUFFERED": "1"} | own


def _init(address: str, options: dict[str, Any]) -> None:
    """Connect to a cluster, in a thread that is left alone once it takes too long: Ray itself may wait for minutes.

    Raises:
        TimeoutError: It takes longer than `INIT_SECONDS`.
    """
    connected: Future[None] = Future()

    def connect() -> None:
        try:
            ray.init(address=address, **options)
            connected.set_result(None)
        except BaseException as error:  # Ray raises errors of many kinds
            connected.set_exception(error)

    threading.Thread(target=connect, daemon=True, name="rlkit-ray-init").start()
    try:
        connected.result(INIT_SECONDS)
    except TimeoutError as error:
        raise TimeoutError(f"it has not let this process in within {INIT_SECONDS:g} s") from error


def _require_listener(address: str) -> None:
    """Check that something listens at an address, since Ray itself tries for minutes.

    Raises:
        OSError: Nothing does.
    """
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()


@contextmanager
def counted_signals() -> Iterator[list[int]]:
    """Collect the signals that would end this process, in the order in which they arrive."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, lambda arrived, _: received.append(arrived)) for number in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler or signal.SIG_DFL)
        sys.stdout.flush()

"""Drives a run on a Ray cluster: connects, reserves devices, starts ranks, and goes on after a node has died."""

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
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from rlkit.base.errors import INTERRUPTED, LaunchError, explain, show
from rlkit.interfaces.launcher import LaunchedRun
from rlkit_ray.attempt import Attempt
from rlkit_ray.cluster import Demand, capacity, require_capacity, reserve
from rlkit_ray.servers import NAMESPACE

if TYPE_CHECKING:
    from rlkit_ray.launcher import Ray

DEATH_SECONDS = 60.0
"""How long Ray may take to notice that a node has died whose agent no longer answers."""

CONNECT_SECONDS = 10.0
"""How long a cluster's address may take to answer."""

INIT_SECONDS = 60.0
"""How long a cluster may take to connect this process, or one of this machine to start."""

PASSED_ON = ("HF_", "NCCL_", "OMP_", "PYTHONPATH", "RLKIT_", "TORCH_", "WANDB_")
"""Beginnings of the environment variables of the command that ranks get too."""


class ClusterDriver:
    """A run on a cluster, from this process.

    Args:
        launcher: Its options.
    """

    def __init__(self, launcher: Ray) -> None:
        self.launcher = launcher

    def launch(self, run: LaunchedRun) -> int:
        self._connect()
        try:
            with counted_signals() as signals:
                return self._run(run, signals)
        finally:
            ray.shutdown()

    def _connect(self) -> None:
        """Connect to the cluster, or start one of this machine.

        Raises:
            LaunchError: It cannot be reached.
        """
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "namespace": NAMESPACE}
        is_local = self.launcher.address == "local"
        if is_local:
            options["include_dashboard"] = False
        try:
            _require_listener(
                os.environ.get("RAY_ADDRESS", "auto") if self.launcher.address == "auto" else self.launcher.address
            )
            _init(self.launcher.address, options)
        except Exception as error:  # Ray raises errors of many kinds
            problem = "where no Ray cluster answers"
            remedy = "start one with `ray start --head`, or set --launcher.address=local"
            if is_local:
                problem = "but Ray cannot start on this machine"
                remedy = "its logs are in /tmp/ray/session_latest/logs; leave out --launcher to run without Ray"
            address = show(self.launcher.address)
            raise LaunchError(f"launcher.address is {address}, {problem}: {explain(error)}; {remedy}") from error

    def _run(self, run: LaunchedRun, signals: list[int]) -> int:
        """Start the run, and again after each death of a node; return the exit status."""
        demand = Demand.of(run, self.launcher.cpus_per_rank, self.launcher.cpus_per_server)
        require_capacity(demand)
        nodes, lost = run.nodes, set[str]()
        for attempt in range(self.launcher.restarts + 1):
            if attempt:
                nodes = self._nodes_left(run, demand, lost, signals)
                restarts = self.launcher.restarts
                print(f"launcher: going on with {nodes} of {run.nodes} nodes ({attempt} of {restarts} restarts)")
            reservation = (
                None if signals else reserve(replace(demand, nodes=nodes), self.launcher.wait_seconds, signals)
            )
            if reservation is None:
                return INTERRUPTED
            attempted = Attempt(replace(run, nodes=nodes), reservation, demand.node, self.launcher.grace_seconds)
            try:
                attempted.start(self._variables(), restarted=attempt > 0)
                end = attempted.watch(signals)
            finally:
                attempted.stop()
            lost |= end.lost_nodes
            if not end.may_go_on or signals:
                return end.status
            print(f"launcher: {end.reason}")
        raise LaunchError(
            f"{end.reason}, after {self.launcher.restarts} restarts (launcher.restarts); logs: {run.out}/launcher"
        )

    def _nodes_left(self, run: LaunchedRun, demand: Demand, lost: set[str], signals: list[int]) -> int:
        """Return on how many nodes the run can go on, with its pools, once Ray has noticed which have died.

        Raises:
            LaunchError: There is no room for any.
        """
        deadline = time.monotonic() + DEATH_SECONDS
        while lost & {node["NodeID"] for node in ray.nodes() if node["Alive"]} and time.monotonic() < deadline:
            time.sleep(1.0)
        deadline = time.monotonic() + self.launcher.wait_seconds
        while not signals:
            for nodes in filter(partial(divides_rows, run), range(demand.nodes, 0, -1)):
                fewer = replace(demand, nodes=nodes)
                if capacity(fewer) == fewer.counts:
                    return nodes
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"the Ray cluster had no room for the run for {self.launcher.wait_seconds:g} s; add nodes"
                )
            time.sleep(1.0)
        return 0

    def _variables(self) -> dict[str, str]:
        """Return the environment variables that ranks get from the command."""
        own = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
        return {"OMP_NUM_THREADS": str(self.launcher.cpus_per_rank), "PYTHONUNBUFFERED": "1"} | own


def divides_rows(run: LaunchedRun, nodes: int) -> bool:
    """Whether the ranks of so many nodes can divide their rows among those of each pool: see `rlkit docs placement`."""
    ranks = nodes * run.ranks_per_node
    return all(max(ranks, len(pool)) % min(ranks, len(pool)) == 0 for pool in run.pools)


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

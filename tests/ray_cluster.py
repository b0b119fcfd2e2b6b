"""A Ray cluster of several "nodes" on this machine, for tests."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray._private import services
from ray.cluster_utils import Cluster

from tests.conftest import ROOT, write_metadata

PACKAGES = (ROOT / "plugins" / "rlkit-ray", ROOT / "plugins" / "rlkit-engine-http")


START_SECONDS = 300.0
"""How long a node may take to register on a busy machine; Ray itself gives up after 30 s."""

get_node_at_once = services.get_node


def get_node(gcs_address: str, node_id: str) -> Any:
    """Return what Ray knows of a node that has just been started, once it has registered."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return get_node_at_once(gcs_address, node_id)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


@contextmanager
def started_cluster(site: Path, nodes: int = 3, quick: bool = True, cpus: int = 1) -> Iterator[Cluster]:
    """Start a head without CPUs and some nodes with a few each, all with the packages of these tests installed.

    Args:
        site: Where the metadata of the packages goes.
        nodes: How many nodes.
        quick: Whether a dead node is noticed in seconds, not by Ray's defaults, which take up to a minute.
        cpus: How many each node has.
    """
    paths: list[str | Path] = [site, ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    for package in PACKAGES:
        write_metadata(package, site)
        paths.append(package / "src")
    options = {"object_store_memory": 100 * 2**20, "include_dashboard": False}
    health = {
        "health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_timeout_ms": 2000,
        "health_check_failure_threshold": 2, "gcs_rpc_server_reconnect_timeout_s": 10,
    }  # fmt: skip
    head = {"num_cpus": 0, **({"_system_config": health} if quick else {}), **options}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
        environment.setattr(services, "get_node", get_node)
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(nodes):
                cluster.add_node(num_cpus=cpus, object_store_memory=100 * 2**20)
            yield cluster
        finally:
            cluster.shutdown()


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.2)
    return condition()


def end_machine(node: Any) -> None:
    """Kill a node as the death of its machine does: its raylet, its workers and all that they have started."""
    raylet = node.all_processes["raylet"][0].process.pid
    pids = [raylet, *(info.process.pid for info in node.all_processes.get("gcs_server", []))]
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            pids += [int(child) for child in path.read_text().split()]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)

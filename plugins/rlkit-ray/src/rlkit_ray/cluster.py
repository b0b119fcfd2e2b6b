"""What a run needs of a Ray cluster: its nodes, and room for the ranks on them."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from rlkit.base.errors import LaunchError, RecipeError
from rlkit.base.text import safe
from rlkit.interfaces.launcher import LaunchedRun

Resources = Mapping[str, float]


@dataclass(frozen=True)
class Reservation:
    """Devices for the pools, the servers and the ranks of a run.

    Args:
        group: The placement group: a bundle for each process of a pool, for each server, and for each node of the run.
        name: The group's name.
        nodes: The id of the node of each bundle.
        order: Bundles of the run's nodes, those on one node next to each other: Ray's PACK does not keep them so.
    """

    group: PlacementGroup
    name: str
    nodes: Sequence[str]
    order: Sequence[int]

    def release(self) -> None:
        """Release the devices, and end what still uses them."""
        remove_placement_group(self.group)


@dataclass(frozen=True)
class Demand:
    """What a run needs of the cluster.

    Args:
        nodes: Number of nodes.
        node: The resources of each node.
        servers: The resources of each server.
        pools: The resources of each process of a pool.
    """

    nodes: int
    node: Resources
    servers: Sequence[Resources] = ()
    pools: Sequence[Resources] = ()

    @property
    def counts(self) -> tuple[int, int, int]:
        """The numbers of processes of pools, of servers and of nodes."""
        return len(self.pools), len(self.servers), self.nodes

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The bundles of the placement group."""
        return [dict(resources) for resources in (*self.pools, *self.servers, *[self.node] * self.nodes)]

    @classmethod
    def of(cls, run: LaunchedRun, cpus_per_rank: int, cpus_per_server: int) -> Demand:
        """Return the resources of a run."""
        ranks = float(run.ranks_per_node)
        node = {"CPU": ranks * cpus_per_rank} | ({"GPU": ranks} if run.on_gpus else {})
        servers = [server_resources(gpus, cpus_per_server) for gpus in run.servers]
        pools = [server_resources(gpus, cpus_per_server) for pool in run.pools for gpus in pool]
        return cls(run.nodes, node, servers, pools)


def server_resources(gpus: int, cpus: int) -> dict[str, float]:
    """Return the resources of a server or of a process of a pool."""
    return {"CPU": float(cpus)} | ({"GPU": float(gpus)} if gpus else {})


def alive_nodes() -> list[dict[str, Any]]:
    """Return the nodes that Ray calls alive."""
    return [node for node in ray.nodes() if node["Alive"]]


def capacity(demand: Demand) -> tuple[int, int, int]:
    """Return for how many processes of pools, servers and nodes of a run the cluster has room if it is not in use."""
    rooms = [dict(node["Resources"]) for node in alive_nodes()]

    def place(resources: Resources) -> bool:
        for room in rooms:
            if all(room.get(name, 0) >= amount for name, amount in resources.items()):
                for name, amount in resources.items():
                    room[name] -= amount
                return True
        return False

    kinds = [kind for kind, count in enumerate(demand.counts) for _ in range(count)]
    bundles = [(_size(bundle), kind, bundle) for kind, bundle in zip(kinds, demand.bundles, strict=True)]
    largest_first = sorted(bundles, key=itemgetter(0, 1), reverse=True)  # of equal ones, nodes
    placed = Counter(kind for _, kind, bundle in largest_first if place(bundle))
    return placed[0], placed[1], placed[2]


def _size(resources: Resources) -> tuple[float, float]:
    return resources.get("GPU", 0), resources["CPU"]


def require_capacity(demand: Demand) -> None:
    """Refuse a run for which the cluster is too small.

    Raises:
        RecipeError: With a table of what the nodes have.
    """
    pools, servers, nodes = capacity(demand)
    if (pools, servers, nodes) == demand.counts:
        return
    names = dict.fromkeys(name for resources in (demand.node, *demand.bundles) for name in resources)
    rows = [
        f"  {safe(node['NodeManagerAddress']):<20}" + "".join(f"{node['Resources'].get(name, 0):>8g}" for name in names)
        for node in alive_nodes()
    ]
    room = f"{nodes} of the run's {demand.nodes} nodes of {_text(demand.node)}"
    if demand.servers:
        room += f", and {servers} of its {len(demand.servers)} servers of {_text(demand.servers[0])}"
    if demand.pools:
        sizes = " or ".join(dict.fromkeys(map(_text, demand.pools)))
        room += f", and {pools} of the {len(demand.pools)} processes of its pools of {sizes}"
    raise RecipeError(
        f"the Ray cluster has room for {room}; its nodes have\n"
        + "\n".join([f"  {'address':<20}" + "".join(f"{name:>8}" for name in names), *rows])
        + "\nset --fabric.num_nodes, --fabric.devices, --launcher.cpus_per_rank"
        + (", --rollout.engine.servers" if demand.servers else "")
        + (", the devices of placement.pools" if demand.pools else "")
        + ", or add nodes by `ray start`"
    )


def _text(resources: Resources) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


def reserve(demand: Demand, wait_seconds: float, signals: Sequence[int]) -> Reservation | None:
    """Reserve devices; return None if a signal arrives meanwhile.

    Raises:
        LaunchError: Others use them for longer than `wait_seconds`.
    """
    bundles = demand.bundles
    name = f"rlkit-{uuid.uuid4().hex}"
    group = placement_group(bundles, strategy="PACK", name=name)
    ready, deadline = group.ready(), time.monotonic() + wait_seconds
    while not ray.wait([ready], timeout=0.5)[0] and not signals and time.monotonic() < deadline:
        pass
    if signals:
        remove_placement_group(group)
        return None
    if not ray.wait([ready], timeout=0)[0]:
        remove_placement_group(group)
        free = ray.available_resources()
        keys = dict.fromkeys(key for bundle in bundles for key in bundle)
        total = {key: sum(bundle.get(key, 0) for bundle in bundles) for key in keys}
        listed = _text({key: free.get(key, 0) for key in total})
        beside = f" and {len(demand.servers)} servers" if demand.servers else ""
        beside += f" and {len(demand.pools)} processes of pools" if demand.pools else ""
        raise LaunchError(
            f"the run needs {_text(total)} for {demand.nodes} nodes{beside}, but for {wait_seconds:g} s only {listed} "
            "were free (launcher.wait_seconds); end other work on the cluster, or wait longer"
        )
    placed = placement_group_table(group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes = range(len(bundles) - demand.nodes, len(bundles))
    order = sorted(nodes, key=lambda bundle: (addresses[placed[bundle]], placed[bundle], bundle))
    return Reservation(group, name, [placed[bundle] for bundle in sorted(placed)], order)

"""What a run needs of a Ray cluster: its nodes, and room for the ranks on them."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from rlkit.base.errors import LaunchError, RecipeError
from rlkit.base.text import safe
from rlkit.interfaces.launcher import LaunchedRun

Resources = Mapping[str, float]


@dataclass(frozen=True)
class Reservation:
    """Devices for the ranks of a run.

    Args:
        group: The placement group, with a bundle for each node of the run.
        nodes: The id of the node of each bundle.
        order: Bundles, those on one node next to each other: Ray's PACK does not keep them so.
    """

    group: PlacementGroup
    nodes: Sequence[str]
    order: Sequence[int]

    def release(self) -> None:
        """Release the devices."""
        remove_placement_group(self.group)


def node_resources(run: LaunchedRun, cpus_per_rank: int) -> dict[str, float]:
    """Return the resources that each node of a run needs."""
    resources = {"CPU": float(run.ranks_per_node * cpus_per_rank)}
    return resources | ({"GPU": float(run.ranks_per_node)} if run.on_gpus else {})


def alive_nodes() -> list[dict[str, Any]]:
    """Return the nodes that Ray calls alive."""
    return [node for node in ray.nodes() if node["Alive"]]


def capacity(resources: Resources, without: Collection[str] = ()) -> int:
    """Return how many nodes of a run have room in the cluster if nothing else uses it.

    Args:
        resources: Of a node of the run.
        without: Ids of nodes that do not count.
    """
    rooms = [
        min(int(node["Resources"].get(name, 0) // amount) for name, amount in resources.items())
        for node in alive_nodes()
        if node["NodeID"] not in without
    ]
    return sum(rooms)


def require_capacity(run: LaunchedRun, resources: Resources) -> None:
    """Refuse a run for which the cluster is too small.

    Raises:
        RecipeError: With a table of what the nodes have.
    """
    room = capacity(resources)
    if room >= run.nodes:
        return
    rows = [
        f"  {safe(node['NodeManagerAddress']):<20}"
        + "".join(f"{node['Resources'].get(name, 0):>8g}" for name in resources)
        for node in alive_nodes()
    ]
    needs = ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
    raise RecipeError(
        f"the Ray cluster has room for {room} of the run's {run.nodes} nodes of {needs}; its nodes have\n"
        + "\n".join([f"  {'address':<20}" + "".join(f"{name:>8}" for name in resources), *rows])
        + "\nset --fabric.num_nodes, --fabric.devices or --launcher.cpus_per_rank, or add nodes by `ray start`"
    )


def reserve(nodes: int, resources: Resources, wait_seconds: float, signals: Sequence[int]) -> Reservation | None:
    """Reserve devices; return None if a signal arrives meanwhile.

    Raises:
        LaunchError: Others use them for longer than `wait_seconds`.
    """
    group = placement_group([dict(resources) for _ in range(nodes)], strategy="PACK")
    ready, deadline = group.ready(), time.monotonic() + wait_seconds
    while not ray.wait([ready], timeout=0.5)[0] and not signals and time.monotonic() < deadline:
        pass
    if signals:
        remove_placement_group(group)
        return None
    if not ray.wait([ready], timeout=0)[0]:
        remove_placement_group(group)
        free = ray.available_resources()
        listed = ", ".join(f"{free.get(name, 0):g} {name}" for name in resources)
        needs = ", ".join(f"{nodes * amount:g} {name}" for name, amount in resources.items())
        raise LaunchError(
            f"the run needs {needs} on {nodes} nodes, but for {wait_seconds:g} s only {listed} were free "
            "(launcher.wait_seconds); end other work on the cluster, or wait longer"
        )
    placed = placement_group_table(group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    order = sorted(placed, key=lambda bundle: (addresses[placed[bundle]], placed[bundle], bundle))
    return Reservation(group, [placed[bundle] for bundle in sorted(placed)], order)
